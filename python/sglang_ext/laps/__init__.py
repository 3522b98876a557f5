"""Two queues on one prefill instance: decisions in `decide`, SGLang's scheduler in `sglang`."""
