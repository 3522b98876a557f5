"""LAPS inside a prefill instance: two queues, parked long prefills, and the policy that chooses between them."""
