"""Pure decisions of the router: admission, placement, the prefill-decode protocol, moves between pools."""
