from megarl.cli import main

main()
