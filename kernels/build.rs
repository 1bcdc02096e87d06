//! Compiles the CUDA sources in `src/` when the feature `cuda` is on; does nothing otherwise.
//!
//! nvcc is run directly, once per source and in parallel, so that each file is a whole program of its own: separate
//! compilation (`--device-c`, which build helpers add for several sources) makes ptxas drop `setmaxnreg` and optimise
//! less. The sources of the portable path, and those that both paths share, become further objects, whose names differ
//! (`src/portable/names.h`). The objects go into one archive through `cc`. With `EXPERTD_PTXAS_STRICT=1`, which CI sets, a kernel that ptxas could not
//! optimise as it should, or that spills registers and is not listed, fails the build.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=ptxas.rs");
    #[cfg(feature = "cuda")]
    if let Err(message) = cuda::build() {
        eprintln!("error: feature `cuda`: {message}");
        std::process::exit(1);
    }
}

#[cfg(feature = "cuda")]
mod ptxas;

#[cfg(feature = "cuda")]
mod cuda {
    use std::collections::BTreeSet;
    use std::env;
    use std::fmt::Write as _;
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    /// Hopper with its architecture-specific instructions (wgmma, setmaxnreg).
    const HOPPER: &str = "arch=compute_90a,code=sm_90a";
    /// Machine code for Ampere and Ada, and PTX that the driver compiles for other GPUs.
    const PORTABLE: &str = "arch=compute_80,code=[sm_80,sm_89,compute_80]";
    /// Sources of both paths.
    const SHARED: [&str; 12] = [
        "combine",
        "copy_in",
        "copy_out",
        "dispatch",
        "experts_pack",
        "experts_pack_narrow",
        "experts_repack",
        "meet",
        "modules",
        "scale",
        "shared",
        "tier",
    ];
    /// If set, kernels that became slower fail the build.
    const STRICT: &str = "EXPERTD_PTXAS_STRICT";
    /// The first release with everything the kernels use.
    const OLDEST: (u32, u32) = (12, 8);

    /// A source, and the path that it is compiled for.
    struct Unit {
        source: PathBuf,
        portable: bool,
    }

    /// A compiler, and the reason why it was searched for at its place.
    struct Toolkit {
        nvcc: PathBuf,
        cudart: PathBuf,
        version: String,
        source: String,
    }

    pub(super) fn build() -> Result<(), String> {
        let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
        let out = PathBuf::from(variable("OUT_DIR")?);
        let toolkit = find(&manifest)?;
        println!("cargo::rustc-env=EXPERTD_NVCC_RELEASE={}", toolkit.version);
        eprintln!("nvcc {} at {} ({})", toolkit.version, toolkit.nvcc.display(), toolkit.source);

        let folder = manifest.join("src");
        println!("cargo::rerun-if-changed={}", folder.display());
        let hopper = sources(&folder)?;
        let shared = hopper.iter().filter(|path| {
            path.file_stem().and_then(|stem| stem.to_str()).is_some_and(|stem| SHARED.contains(&stem))
        });
        let portable = sources(&folder.join("portable"))?.into_iter().chain(shared.cloned());
        let portable: Vec<Unit> = portable.map(|source| Unit { source, portable: true }).collect();
        let mut units: Vec<Unit> =
            hopper.into_iter().map(|source| Unit { source, portable: false }).collect();
        units.extend(portable);
        let objects = compile_all(&toolkit, &units, &out)?;

        let mut archive = cc::Build::new();
        for object in objects {
            archive.object(object);
        }
        archive
            .try_compile("expertd_kernels")
            .map_err(|e| format!("cannot archive the kernel objects: {e}"))?;
        println!("cargo::rustc-link-search=native={}", toolkit.cudart.display());
        println!("cargo::rustc-link-lib=static=cudart_static");
        for library in ["stdc++", "dl", "rt", "pthread"] {
            println!("cargo::rustc-link-lib=dylib={library}");
        }
        Ok(())
    }

    fn variable(name: &str) -> Result<String, String> {
        env::var(name).map_err(|e| format!("{name}: {e}"))
    }

    /// The `.cu` files, sorted so that builds do not depend on the order of directory entries.
    fn sources(folder: &Path) -> Result<Vec<PathBuf>, String> {
        let entries = fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let mut sources: Vec<PathBuf> = entries
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
            .collect();
        sources.sort();
        if sources.is_empty() {
            return Err(format!("no .cu files in {}", folder.display()));
        }
        Ok(sources)
    }

    /// Finds nvcc: at the place that CUDA_HOME or NVCC names, otherwise at the usual places. A named place without a usable
    /// compiler is an error and is never skipped.
    fn find(manifest: &Path) -> Result<Toolkit, String> {
        for name in ["CUDA_HOME", "NVCC", "PATH", "EXPERTD_NVCC_FLAGS", STRICT] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        if let Some(home) = env::var_os("CUDA_HOME").filter(|home| !home.is_empty()) {
            // In a folder of scripts/fetch-cuda.sh the toolkit is in a subfolder.
            let fetched = Path::new(&home).join(FETCHED);
            let nvcc = if fetched.is_file() { fetched } else { Path::new(&home).join("bin/nvcc") };
            return probe(&nvcc, "CUDA_HOME").map_err(|why| {
                format!(
                    "CUDA_HOME={} does not hold a usable toolkit: {why}\n{WAY_OUT}",
                    home.to_string_lossy()
                )
            });
        }
        if let Some(nvcc) = env::var_os("NVCC").filter(|nvcc| !nvcc.is_empty()) {
            return probe(Path::new(&nvcc), "NVCC")
                .map_err(|why| format!("NVCC={} is not usable: {why}\n{WAY_OUT}", nvcc.to_string_lossy()));
        }
        let mut places: Vec<(PathBuf, &str)> = env::var_os("PATH")
            .map(|path| env::split_paths(&path).map(|entry| (entry.join("nvcc"), "PATH")).collect())
            .unwrap_or_default();
        places.push((PathBuf::from("/usr/local/cuda/bin/nvcc"), "the usual place"));
        let fetched = manifest.join("../target/cuda").join(FETCHED);
        println!("cargo::rerun-if-changed={}", fetched.display());
        places.push((fetched, "scripts/fetch-cuda.sh"));

        let mut refused = String::new();
        for (nvcc, source) in places {
            if !nvcc.is_file() {
                continue;
            }
            match probe(&nvcc, source) {
                Ok(toolkit) => {
                    if !refused.is_empty() {
                        println!("cargo::warning=passed over:{}", refused.replace('\n', " "));
                    }
                    return Ok(toolkit);
                }
                Err(why) => {
                    let _ = write!(refused, "\n  {} ({source}): {why}", nvcc.display());
                }
            }
        }
        Err(format!(
            "no usable nvcc. Looked at CUDA_HOME and NVCC (not set), PATH, /usr/local/cuda and target/cuda.{refused}\n{WAY_OUT}"
        ))
    }

    /// Path of the compiler that pip installs, in the folder given to scripts/fetch-cuda.sh.
    const FETCHED: &str = "nvidia/cu13/bin/nvcc";
    const WAY_OUT: &str = "Way out: run scripts/fetch-cuda.sh (it needs Python and pip only), or set CUDA_HOME to a \
                           toolkit of CUDA 12.8 or newer, or build without `--features cuda`.";

    /// Runs the compiler for its version and finds the static runtime library that belongs to it.
    fn probe(nvcc: &Path, source: &str) -> Result<Toolkit, String> {
        let output =
            Command::new(nvcc).arg("--version").output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text
            .split_once("release ")
            .and_then(|(_, rest)| rest.split_once(','))
            .map(|(version, _)| version.trim().to_owned())
            .ok_or_else(|| format!("`nvcc --version` printed no release: {}", text.trim()))?;
        let mut parts = version.split('.').map(str::parse::<u32>);
        let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else {
            return Err(format!("cannot read the release `{version}`"));
        };
        if (major, minor) < OLDEST {
            return Err(format!("its release is {version}, expected {}.{} or newer", OLDEST.0, OLDEST.1));
        }
        // Installed toolkits may be reached through links (/usr/bin/nvcc): resolve them to find the libraries.
        let real = nvcc.canonicalize().map_err(|e| format!("{}: {e}", nvcc.display()))?;
        let home = real.parent().and_then(Path::parent).ok_or("nvcc is not in a bin folder")?;
        let cudart = ["lib64", "lib", "targets/x86_64-linux/lib"]
            .iter()
            .map(|folder| home.join(folder))
            .find(|folder| folder.join("libcudart_static.a").is_file())
            .ok_or_else(|| format!("no libcudart_static.a under {}", home.display()))?;
        Ok(Toolkit { nvcc: real, cudart, version, source: source.to_owned() })
    }

    /// One nvcc process per source, as many at a time as cargo allows.
    fn compile_all(toolkit: &Toolkit, units: &[Unit], out: &Path) -> Result<Vec<PathBuf>, String> {
        let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1_usize);
        let next = AtomicUsize::new(0);
        let errors = Mutex::new(String::new());
        let seen = Mutex::new(BTreeSet::new());
        let object = |unit: &Unit| {
            let name = unit.source.file_stem().unwrap_or_default().to_string_lossy();
            out.join(format!("{}{name}.o", if unit.portable { "portable_" } else { "" }))
        };
        let objects: Vec<PathBuf> = units.iter().map(object).collect();
        thread::scope(|scope| {
            for _ in 0..jobs.min(units.len()) {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(unit) = units.get(index) else { return };
                        match compile(toolkit, unit, &objects[index]) {
                            Ok(headers) => {
                                if let Ok(mut seen) = seen.lock() {
                                    seen.extend(headers);
                                }
                            }
                            Err(why) => {
                                if let Ok(mut errors) = errors.lock() {
                                    errors.push_str(&why);
                                }
                            }
                        }
                    }
                });
            }
        });
        for header in seen.into_inner().map_err(|e| e.to_string())? {
            println!("cargo::rerun-if-changed={header}");
        }
        let errors = errors.into_inner().map_err(|e| e.to_string())?;
        if errors.is_empty() { Ok(objects) } else { Err(errors) }
    }

    /// Compiles one source and returns the project's own headers that it read.
    fn compile(toolkit: &Toolkit, unit: &Unit, object: &Path) -> Result<Vec<String>, String> {
        let Unit { source, portable } = unit;
        let depfile = object.with_extension("d");
        let folder = source.parent().unwrap_or_else(|| Path::new(""));
        // Headers of both paths are in the upper folder.
        let folder = if folder.ends_with("portable") { folder.parent().unwrap_or(folder) } else { folder };
        let mut command = Command::new(&toolkit.nvcc);
        command
            .args(["-c", "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-DNDEBUG"])
            .arg(format!("-gencode={}", if *portable { PORTABLE } else { HOPPER }))
            .args(["-Xcompiler", "-fPIC,-Wall,-Wno-unknown-pragmas", "-Xptxas", "-warn-spills"])
            .args(["-cudart", "none", "-MD", "-MF"])
            .arg(&depfile)
            .args(["-o"])
            .arg(object)
            .arg(source);
        if *portable {
            command.arg("-include").arg(folder.join("portable/names.h"));
        } else {
            // Line numbers for profilers. The portable kernels go without: with three targets they would double the size of the binary.
            command.arg("-lineinfo");
        }
        if let Ok(flags) = env::var("EXPERTD_NVCC_FLAGS") {
            command.args(flags.split_whitespace());
        }
        // An object is kept if neither the command nor a file that it was made from has changed.
        let record = object.with_extension("command");
        let line = format!("{} {STRICT}={:?} {command:?}", toolkit.version, env::var_os(STRICT));
        let warn = |diagnostics: &str| {
            for line in diagnostics.lines().filter(|line| !line.trim().is_empty()) {
                println!("cargo::warning={line}");
            }
        };
        let before = fs::read_to_string(&record).unwrap_or_default();
        if let Some(diagnostics) = before.strip_prefix(&line)
            && is_newer(object, &depfile)
        {
            warn(diagnostics);
            return headers(&depfile, folder);
        }
        let _ = fs::remove_file(&record);
        let output = command.output().map_err(|e| format!("{}: {e}", toolkit.nvcc.display()))?;
        let diagnostics = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            return Err(format!(
                "{} failed ({}):\n{}{}\n",
                source.display(),
                output.status,
                diagnostics,
                String::from_utf8_lossy(&output.stdout)
            ));
        }
        let regressions = super::ptxas::regressions(&diagnostics);
        if !regressions.is_empty() && env::var_os(STRICT).is_some() {
            return Err(format!(
                "{}: ptxas made slower kernels than it should ({STRICT}; kernels/ptxas.rs lists what may spill):\n{}\n",
                source.display(),
                regressions.join("\n")
            ));
        }
        warn(&diagnostics);
        fs::write(&record, format!("{line}\n{diagnostics}"))
            .map_err(|e| format!("{}: {e}", record.display()))?;
        headers(&depfile, folder)
    }

    /// Whether the object is newer than every file that it was made from.
    fn is_newer(object: &Path, depfile: &Path) -> bool {
        let changed = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
        let (Some(made), Ok(text)) = (changed(object), fs::read_to_string(depfile)) else { return false };
        let from = text.split_once(" : ").map_or("", |(_, from)| from);
        let mut from = from.split_whitespace().filter(|word| *word != "\\").peekable();
        from.peek().is_some() && from.all(|path| changed(Path::new(path)).is_some_and(|at| at < made))
    }

    /// The project's own headers that a source read.
    fn headers(depfile: &Path, folder: &Path) -> Result<Vec<String>, String> {
        let text = fs::read_to_string(depfile).map_err(|e| format!("{}: {e}", depfile.display()))?;
        let folder = folder.to_string_lossy();
        Ok(text
            .split_whitespace()
            .filter(|word| word.starts_with(&*folder) && !word.ends_with(':'))
            .map(str::to_owned)
            .collect())
    }
}
