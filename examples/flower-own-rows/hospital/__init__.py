"""What runs at a site of this federation besides fald."""
