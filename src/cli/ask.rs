//! One request to the admin port of the gateway that a configuration describes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::control::{NoPlan, Source};
use crate::pure::board::Registry;
use crate::pure::plan::{AdminListen, MadeKeys};

/// What the admin port said.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: String,
}

/// The admin port is on this machine and answers from memory.
const PATIENCE: Duration = Duration::from_secs(10);
const ANSWER_MAX: u64 = 64 * 1024 * 1024;

/// Asks the gateway that runs on `config`. Blocks for at most some seconds.
///
/// # Errors
/// The file is wrong or has no admin port, nobody listens there, or the answer is no HTTP.
pub fn ask(config: &Path, method: &str, path: &str, body: Option<&str>) -> Result<Answer, String> {
    let source = Source::File(config.to_owned());
    let plan = source
        .load(&MadeKeys::default(), &mut Registry::new())
        .map_err(|no_plan| match no_plan {
            NoPlan::Unreadable(why) => why,
            no_plan => no_plan.report(&source.name()),
        })?
        .plan;
    let listen = plan.admin.listen.as_ref().ok_or("the file has no admin port")?;
    let token = plan.admin.token.as_ref().map(|token| token.expose());
    let request = request(method, path, token, body.unwrap_or_default());
    let (place, answer) = match listen {
        AdminListen::Tcp(address) => (address.to_string(), {
            TcpStream::connect_timeout(address, PATIENCE).and_then(|stream| {
                stream.set_read_timeout(Some(PATIENCE))?;
                exchange(stream, &request)
            })
        }),
        AdminListen::Unix(path) => {
            let path = source.beside(path);
            let answer = UnixStream::connect(&path).and_then(|stream| {
                stream.set_read_timeout(Some(PATIENCE))?;
                exchange(stream, &request)
            });
            (path.display().to_string(), answer)
        }
    };
    let answer =
        answer.map_err(|error| format!("no gateway answers at {place} (admin.listen): {error}"))?;
    parse(&answer).ok_or_else(|| format!("what answers at {place} is no gateway"))
}

fn request(method: &str, path: &str, token: Option<&str>, body: &str) -> String {
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n"));
    format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{}content-type: \
         application/json\r\ncontent-length: {}\r\n\r\n{body}",
        token.unwrap_or_default(),
        body.len()
    )
}

fn exchange(mut stream: impl Read + Write, request: &str) -> io::Result<String> {
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.take(ANSWER_MAX).read_to_string(&mut answer)?;
    Ok(answer)
}

/// The admin port gives lengths, and closes because it was asked to.
fn parse(answer: &str) -> Option<Answer> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    Some(Answer { status, body: body.to_owned() })
}

/// For a path or a query.
pub fn escape(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes()
        .map(|byte| match plain(byte) {
            true => char::from(byte).to_string(),
            false => format!("%{byte:02X}"),
        })
        .collect()
}
