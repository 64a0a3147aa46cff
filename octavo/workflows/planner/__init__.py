"""The planner's parts: accounting, memory, time, hardware and search. None of them imports torch."""
