# Recipes. `./dev RECIPE` installs what is missing first.

set shell := ["bash", "-euo", "pipefail", "-c"]
export KS_CACHE := env("KS_CACHE", env("XDG_CACHE_HOME", env("HOME") / ".cache") / "keepstate")
export CARGO_TARGET_DIR := env("CARGO_TARGET_DIR", KS_CACHE / "target")
libexec_debug := CARGO_TARGET_DIR / "libexec-debug"
libexec_release := CARGO_TARGET_DIR / "libexec-release"

# list the recipes
default:
    @just --list --unsorted

# format, Clippy and the structure test; never edits
check:
    cargo fmt --all --check
    cargo clippy -q --workspace --all-targets -- -D warnings
    cargo test -q -p ks-simulations --test tidy

# what `check` would complain about and a program can mend
fix:
    cargo fmt --all
    cargo clippy -q --workspace --all-targets --fix --allow-dirty --allow-staged

# all programs, side by side in one folder (PROFILE: debug or release)
build PROFILE="release":
    ci/build {{PROFILE}}

# the default guest image, cached by content
image PROFILE="release": (build PROFILE)
    ci/image {{PROFILE}}

# every check and test, ending with one line of counts
test:
    ci/test

# kill a working session, VM and daemon, and watch it come back; then three forks of one parent. `demo fleet`: three
# nodes on this machine, every process of the owner killed
demo *ARGS: image
    ci/with-node {{libexec_release}} demo {{ARGS}}

# a benchmark: resume, checkpoint, soak, start, failover, replicate, gateway, replay or fleet-scale; JSON on the last line
bench NAME *ARGS:
    {{ if NAME == "fleet-scale" { "cargo run -q --release -p ks-simulations --bin fleet-scale --" } else { "'" + just_executable() + "' image && ci/with-node '" + libexec_release + "' bench " + NAME } }} {{ARGS}}

# seeded simulations of the fleet
simulate *ARGS:
    cargo run -q --release -p ks-simulations --bin simulate -- {{ARGS}}
