"""FragmentMoe, the package's own mixture-of-experts model, and what it shares with stock `transformers`."""
