"""The numbers behind `memory_budget`, each with its reason.

They say how far a measurement is trusted, and how much time it may take. No
option sets them; a share is of what it is compared with.
"""

# --- How a step is measured ------------------------------------------------

# Operations that run side by side end in another order in each step, which
# makes peaks differ by an operation's result: several steps have to be seen.
NUM_STEPS = 6
# Of short steps more are taken: many tell more of the highest peak, and the
# fastest of them is hardly disturbed by what else the machine does.
MOST_STEPS, LEAST_SECONDS = 20, 1.0
# Of long steps fewer are taken: of a plan's, whose peak is a promise; of an
# option among others; and of a probe, which only has to place a line.
PLAN_SECONDS, OPTION_SECONDS, PROBE_SECONDS = 20.0, 5.0, 1.0
# Threads that have fallen asleep, as between the steps of `fit`, begin their
# work in another order than those that go on at once.
PAUSE_SECONDS = 0.05
# A peak that this share of the steps has, or nearly, is the highest there is,
# as far as seen.
OFTEN, NEARLY = 1 / 3, 0.999
# Two steps are compared in so many turns, but in fewer, of which the median
# still counts, if they take long.
NUM_TURNS, LEAST_TURNS = 7, 3
# How many measurements are remembered, of which a search makes a dozen.
MAX_MEASURED = 256

# --- How options are searched ----------------------------------------------

# Steps do not all have the same peak, and one that is measured anew may need
# more. XLA's do, but the input pipeline beside them may not.
MARGIN, MARGIN_IN_XLA = 0.01, 0.003
# Each probe has so many times the examples of the one before, until that
# makes it need so much more: the update alone no longer says what it needs.
PROBE_GROWTH, PEAK_GROWTH = 4, 1.3
# The line through the probes may be wrong by this much: a dry run tells.
LINE_TOLERANCE = 1.1
# Two measurements of the same step differ by less.
LEAST_GAIN = 0.05
# What the micro-batches of a step can cost besides their examples.
MOST_OVERHEAD = 0.5
# By how much a time that was predicted, or measured while the machine did
# other work, may be wrong.
DOUBT = 0.25
# How many plans are tried for one number of micro-batches.
MAX_PLANS = 3

# --- How a plan is corrected -----------------------------------------------

# A plan that leaves less of the budget unused is not corrected any more.
SLACK = 0.05
# How many plans are run for one budget, and how many with less recomputation
# where XLA's peak is not as drawn.
MAX_DRY_RUNS, MAX_LESS = 6, 3
# What a step that ran out of memory is taken to need beyond its prediction,
# and how much less its next option has to need.
OUT_OF_MEMORY_STEP = 0.1
# Plans of that many models are remembered; a plan from an earlier time serves
# where what is in memory besides differs by less than this share of its peak.
MAX_LEARNED, SAME = 8, 0.01

# --- How training adapts ---------------------------------------------------

# How often a step is taken before training ends.
MAX_ATTEMPTS = 6
# In how many steps processes tell one another what they needed.
NUM_AGREED = 3
