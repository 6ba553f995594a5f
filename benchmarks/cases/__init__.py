"""What is measured, a folder for each area."""
