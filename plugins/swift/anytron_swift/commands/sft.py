"""The script that ``anytron-swift sft`` runs, on every rank."""

from anytron_swift.process import start

if __name__ == "__main__":  # processes that it spawns import it again
    start("megatron_sft_main")
