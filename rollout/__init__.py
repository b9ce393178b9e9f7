"""The sampling side: vLLM servers with our plugin, and the workers that drive them."""
