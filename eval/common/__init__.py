"""What the commands of evaluation share."""
