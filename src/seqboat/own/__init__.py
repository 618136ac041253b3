"""Your own data: any of the inputs with any of the targets.

    inputs     words or bytes of texts, lists of events, series of numbers, folders of sounds, images or texts
    targets    a class, several labels, a number, a tag for each token

`tables` and `records` read, `inputs` and `targets` turn records into numbers and back, `task` joins them behind the
contract of a task, `baselines` has the simple thing, `fit` learns in minutes, `session` serves shell and Python.
"""

import seqboat.tasks  # noqa: F401  (tables of tasks come first: they list these)
