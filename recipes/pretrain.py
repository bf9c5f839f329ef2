"""The script the deepspeed launcher starts: `deepspeed recipes/pretrain.py --recipe recipes/demo.yaml`."""

from moe_fragment.train.main import main

if __name__ == "__main__":
    main()
