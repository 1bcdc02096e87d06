//! Runs the target that `EXPERTD_FUZZ_TARGET` selects on every file of the given directories, once and without libFuzzer, for
//! `scripts/fuzz.sh --coverage`.

fn main() -> std::io::Result<()> {
    let target = expertd_fuzz::selected();
    let mut inputs = 0;
    for directory in std::env::args_os().skip(1) {
        for entry in std::fs::read_dir(directory)? {
            (target.run)(&std::fs::read(entry?.path())?);
            inputs += 1;
        }
    }
    println!("{}: {inputs} inputs", target.name);
    Ok(())
}
