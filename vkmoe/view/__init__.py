"""Shows what the experts of a loaded model do, why its tokens take long, and changes both."""
