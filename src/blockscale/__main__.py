from blockscale.cli import main

main()
