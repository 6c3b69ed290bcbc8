"""The numbers behind `memory_budget`, each with its reason.

They say how far a measurement is trusted, and how much time it may take. A
share of bytes is one of what a step adds to what is in memory: that is known,
and how large it is decides nothing. No option sets them.
"""

# A step whose operations are in order needs the same memory each time. On
# several devices they are not, and times always differ: up to so many steps
# have to be seen. Of long ones fewer are taken, once they have run for so long:
# two, and three in turns.
NUM_STEPS, ENOUGH_SECONDS = 6, 10.0
# Left free of a budget: a step that is measured anew may need more.
MARGIN = 0.01
# By how much what is computed may be wrong, of bytes and of seconds. A step
# that ran out of memory is taken to need so much more.
DOUBT = 0.1
# How often a step is taken, and how many plans are run for one budget.
MAX_ATTEMPTS = 6
# What so many models, or steps, need is remembered.
MAX_KEPT = 64
