"""The outer step: from the average of the outer gradients to new outer parameters, and the merge."""
