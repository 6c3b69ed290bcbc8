"""One batch makes one gradient, and one update of the weights."""
