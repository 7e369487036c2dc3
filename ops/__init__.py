"""The registered operators and the facts about them: layouts, kernels and mask contracts."""
