"""A list of calls that reach every kernel a backend can choose, and their check on a GPU.

`python -m flash_pallas doctor --full` runs it. `rows` lists what there is to run, from the
backends' answers; `calls` draws the arrays of a row; `dense` says what is right, in numpy; `check`
runs and compares one row; `digests` names the machine's input for it; `run` has the processes.
"""
