//! The floor: bytes passed between two sockets on Forebay's runtime, with its ring and its pinning,
//! and nothing known of them. No head is read, no key checked, nothing counted, and each client has
//! a backend connection of its own. What a proxy costs beyond this is what it does.

use std::io;
use std::net::SocketAddr;
use std::num::NonZeroUsize;

use monoio::io::{AsyncReadRent, AsyncWriteRent, AsyncWriteRentExt, Splitable};
use monoio::net::{ListenerOpts, TcpListener, TcpStream};

/// A read takes at most this much: more than any chunk of the comparison.
const PIECE: usize = 4096;

/// Serves on `listen` until the process ends, passing what comes to `backend` and back.
///
/// # Errors
/// A ring or a listener could not be set up.
pub fn serve(listen: SocketAddr, backend: SocketAddr, workers: NonZeroUsize) -> io::Result<()> {
    let threads: Vec<_> = (0..workers.get())
        .map(|cpu| std::thread::spawn(move || worker(listen, backend, cpu)))
        .collect();
    println!("floor on {listen}");
    threads
        .into_iter()
        .try_for_each(|thread| thread.join().map_err(|_| io::Error::other("a worker panicked"))?)
}

fn worker(listen: SocketAddr, backend: SocketAddr, cpu: usize) -> io::Result<()> {
    core_affinity::set_for_current(core_affinity::CoreId { id: cpu });
    let mut ring = io_uring::IoUring::builder();
    ring.setup_single_issuer().setup_defer_taskrun();
    monoio::RuntimeBuilder::<monoio::IoUringDriver>::new()
        .uring_builder(ring)
        .with_entries(1024)
        .build()?
        .block_on(async move {
            let options = ListenerOpts::new().reuse_port(true).reuse_addr(true).backlog(4096);
            let listener = TcpListener::bind_with_config(listen, &options)?;
            loop {
                let (client, _) = listener.accept().await?;
                monoio::spawn(async move {
                    let _ = join(client, backend).await;
                });
            }
        })
}

async fn join(client: TcpStream, backend: SocketAddr) -> io::Result<()> {
    client.set_nodelay(true)?;
    let backend = TcpStream::connect_addr(backend).await?;
    backend.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_backend, to_backend) = backend.into_split();
    monoio::spawn(pass(from_client, to_backend));
    pass(from_backend, to_client).await;
    Ok(())
}

async fn pass(mut from: impl AsyncReadRent, mut to: impl AsyncWriteRent) {
    let mut buf = Vec::with_capacity(PIECE);
    loop {
        let (read, filled) = from.read(buf).await;
        if !matches!(read, Ok(1..)) {
            break;
        }
        let (written, mut used) = to.write_all(filled).await;
        if written.is_err() {
            break;
        }
        used.clear();
        buf = used;
    }
    let _ = to.shutdown().await;
}
