"""Who talks to whom across processes.

    check, identify, replay --- loading --- asking --- worker ---(wire: question, answer)--- answering --- properties
                                                         |                                      |
                                                     printed <--(a pipe: what is printed)--- nursing
                                                         |
                                template   one process with torch imported; all others are copies of it
                                   |
    sweep, mutants ------------- apart ---(one call, one row)---------- sweeping, tests.mutants.judging
                                   |
                              judged_store   rows on disk: an interrupted command goes on

    check, sweep, mutants -- elsewhere ---(a cluster: chores)---------- hosting, which asks and judges apart there

`asking` gives every subject processes of its own and replaces one that hangs or dies, three times; `worker` keeps the
limit of a call from outside, by the pulse that the process shares, in seconds that count (`properties.results.clocks`);
`nursing` sees that nothing a process starts outlives it. `apart` gives each call a time limit.
`elsewhere` has the faces of both for `--cluster`; `hosting` is their far side, a process beside each worker.
What stands left of these arrows never imports torch nor the user's code.
"""
