"""The steps of a job. Each opens its inputs, plans, makes one graph call, finishes and reports."""
