"""What one constructor option or one argument of a call switches on, by its name."""
