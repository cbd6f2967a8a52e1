"""Writing datasets: create, append, convert, shuffle."""
