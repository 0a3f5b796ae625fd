from looped_recipes.demo.options import parse


if __name__ == "__main__":
    options = parse()  # before the libraries, which take seconds to import
    if options.ask is None:
        print("about five minutes on two idle cores; stopped by Ctrl-C, the same command goes on", flush=True)
    try:
        from looped_recipes.demo.command import run

        run(options)
    except KeyboardInterrupt:  # during the imports
        raise SystemExit("interrupted") from None
