"""The C library: its calls and structs, and objects around them."""
