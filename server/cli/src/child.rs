//! Questions that a child process of this program answers, so that this process loads no driver and no library for them.

use std::ffi::OsStr;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The output of a child process.
pub(crate) struct ChildAnswer {
    pub status: ExitStatus,
    /// What it wrote to its standard output and standard error, without blanks at the ends.
    pub output: String,
    pub errors: String,
}

/// Starts this program with `arguments` and waits for its answer. `None` after `deadline`: then the child is killed and reaped on a
/// thread of its own, because a driver may hold it. Its answer must fit in the buffers of pipes, 64 KiB.
///
/// # Errors
/// If the child cannot be started.
pub(crate) fn ask(
    arguments: &[&OsStr],
    environment: &[(String, String)],
    deadline: Duration,
) -> std::io::Result<Option<ChildAnswer>> {
    let mut child = Command::new("/proc/self/exe")
        .arg0("expertd")
        .args(["--log", "error"])
        .args(arguments)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let end = Instant::now() + deadline;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            None => {
                let _ = child.kill();
                std::thread::spawn(move || child.wait());
                return Ok(None);
            }
        }
    };
    let (mut output, mut errors) = (String::new(), String::new());
    if let Some(pipe) = &mut child.stdout {
        let _ = pipe.read_to_string(&mut output);
    }
    if let Some(pipe) = &mut child.stderr {
        let _ = pipe.read_to_string(&mut errors);
    }
    let trimmed = |text: String| text.trim().to_owned();
    Ok(Some(ChildAnswer { status, output: trimmed(output), errors: trimmed(errors) }))
}
