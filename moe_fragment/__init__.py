"""moe_fragment: train mixture-of-experts transformers across fragmented GPU clusters.

The public names are imported when they are first used, so that `import moe_fragment` stays fast; it registers
`moe_fragment` with transformers' Auto classes and `cross_cluster` with its experts interface as soon as transformers
is there.
"""
