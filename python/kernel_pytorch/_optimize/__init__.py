"""Behind kernel_pytorch.optimize and .restore: optimize.py is the way in, report.py what comes out."""
