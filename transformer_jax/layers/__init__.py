"""Arrays to arrays: attention, masks, positions, dropout, and the blocks made of them."""
