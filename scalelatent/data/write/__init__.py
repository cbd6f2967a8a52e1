"""Write datasets: create, append, convert, shuffle."""
