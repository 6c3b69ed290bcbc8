"""Sharded training: every process holds one shard of the training state.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (2020), and FSDP: weights, gradients and the optimizer's
variables are cut into as many shards as there are processes. A layer's
weights are gathered when it runs, its gradients are summed up and cut where
they are made, and the optimizer sees shards only. What it does not do: start
processes, which TF_CONFIG names and whoever sets it starts.
"""
