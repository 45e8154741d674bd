"""The script that ``anytron-swift export`` runs, on every rank."""

from anytron_swift.process import start

if __name__ == "__main__":  # processes that it spawns import it again
    start("megatron_export_main")
