//! Writes the seeds of every target to `DIRECTORY/TARGET/`, and prints `TARGET BINARY` for each target.

use std::path::PathBuf;

use expertd_fuzz::{TARGETS, seeds};

fn main() -> std::io::Result<()> {
    let Some(directory) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return Err(std::io::Error::other("usage: fuzz-seeds DIRECTORY"));
    };
    for target in TARGETS {
        std::fs::create_dir_all(directory.join(target.name))?;
        println!("{} {}", target.name, target.binary);
    }
    for (number, seed) in seeds::all().into_iter().enumerate() {
        std::fs::write(directory.join(seed.target).join(format!("seed-{number}")), seed.data)?;
    }
    Ok(())
}
