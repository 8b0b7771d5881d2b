"""What every host of a job must show before ranks start on it, and who is left out."""
