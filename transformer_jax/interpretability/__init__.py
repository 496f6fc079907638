"""Looking inside: a model's named values returned or replaced, and what they tell."""
