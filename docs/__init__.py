"""What the README shows: a picture and a table, and the programs that make them."""
