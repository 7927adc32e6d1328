"""Other libraries' NVFP4 quantisers, modelled so that their bits can be compared with ours without installing them."""
