"""The laboratory: experiments about the methods, their runs, tables and pictures; a benchmark."""
