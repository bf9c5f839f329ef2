"""One module per stage of a codec; `parse_codec` finds every module in here by itself."""
