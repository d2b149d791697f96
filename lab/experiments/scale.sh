# On paper: how many Gbit/s between replicas does each compute utilization need?
python -m lab.planner --out lab/results/scale
