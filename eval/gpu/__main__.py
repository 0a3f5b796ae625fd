from looped_recipes.common.command_line import run_package


if __name__ == "__main__":
    run_package(__package__)
