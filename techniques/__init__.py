"""The techniques that come with Saturn: one file each, found by its name."""
