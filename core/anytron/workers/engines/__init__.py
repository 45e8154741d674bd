"""What engines are to the loop: their protocols, and how weights travel between them."""
