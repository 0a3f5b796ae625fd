"""Code shared by the commands of evaluation."""
