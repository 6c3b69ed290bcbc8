"""The numbers behind `memory_budget`, each with its reason.

They say how far a measurement is trusted, and how much time it may take. No
option sets them; a share is of what it is compared with.
"""

# Operations that run side by side end in another order in each step, which
# makes peaks and times differ: several steps have to be seen. Of long ones
# fewer are taken, once they have run for so long: two, and three in turns.
NUM_STEPS, ENOUGH_SECONDS = 6, 10.0
# Threads that have fallen asleep, as between the steps of `fit`, begin their
# work in another order than those that go on at once.
PAUSE_SECONDS = 0.05
# Left free of a budget: a step that is measured anew may need more.
MARGIN = 0.01
# By how much what is computed may be wrong, of bytes and of seconds. A step
# that ran out of memory is taken to need so much more.
DOUBT = 0.1
# How often a step is taken, and how many plans are run for one budget.
MAX_ATTEMPTS = 6
# What so many models, or steps, need is remembered.
MAX_KEPT = 64
