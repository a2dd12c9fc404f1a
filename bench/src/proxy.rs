//! The plain hyper proxy: what one gets from hyper on tokio's multi-threaded runtime with a pool of
//! kept-alive connections, and nothing else. No limits, no checks, no metrics: a peer to beat, so
//! it is built as its documentation suggests and given every setting that helps it.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{CONNECTION, HOST, HeaderValue};
use hyper::http::uri::{Authority, Scheme, Uri};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};

/// Serves on `listen` until the process ends, passing every request to `backend`.
///
/// # Errors
/// The listener or the runtime could not be set up.
pub fn serve(listen: SocketAddr, backend: SocketAddr, workers: NonZeroUsize) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers.get())
        .enable_all()
        .build()?;
    // Accepting on a worker, not on the thread that only blocks, saves a hop per connection.
    let accepting = runtime.spawn(async move { accept(listen, backend).await });
    runtime.block_on(accepting).map_err(io::Error::other)?
}

async fn accept(listen: SocketAddr, backend: SocketAddr) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(crate::net::listen(listen)?)?;
    println!("hyper-proxy on {}", listener.local_addr()?);
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(Duration::from_mins(1))
        .pool_max_idle_per_host(usize::MAX)
        .build::<_, Incoming>(connector);
    let authority: Authority = backend.to_string().parse().map_err(io::Error::other)?;
    loop {
        let (sock, _) = listener.accept().await?;
        sock.set_nodelay(true)?;
        let (client, authority) = (client.clone(), authority.clone());
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let (client, authority) = (client.clone(), authority.clone());
                async move { Ok::<_, Infallible>(pass(&client, authority, request).await) }
            });
            // A connection that breaks concerns its client only.
            let _ = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .serve_connection(TokioIo::new(sock), service)
                .await;
        });
    }
}

enum Reply {
    Backend(Incoming),
    Nothing,
}

async fn pass(
    client: &Client<HttpConnector, Incoming>,
    authority: Authority,
    mut request: Request<Incoming>,
) -> Response<Reply> {
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    parts.scheme = Some(Scheme::HTTP);
    parts.authority = Some(authority);
    let host = parts.authority.as_ref().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
    let Ok(uri) = Uri::from_parts(parts) else { return failed(StatusCode::BAD_REQUEST) };
    *request.uri_mut() = uri;
    request.headers_mut().remove(CONNECTION);
    if let Some(host) = host {
        request.headers_mut().insert(HOST, host);
    }
    match client.request(request).await {
        Ok(response) => {
            let (mut parts, body) = response.into_parts();
            parts.headers.remove(CONNECTION);
            Response::from_parts(parts, Reply::Backend(body))
        }
        Err(_) => failed(StatusCode::BAD_GATEWAY),
    }
}

fn failed(status: StatusCode) -> Response<Reply> {
    let mut response = Response::new(Reply::Nothing);
    *response.status_mut() = status;
    response
}

impl hyper::body::Body for Reply {
    type Data = hyper::body::Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
        match self.get_mut() {
            Reply::Backend(body) => std::pin::Pin::new(body).poll_frame(context),
            Reply::Nothing => std::task::Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Reply::Backend(body) => body.is_end_stream(),
            Reply::Nothing => true,
        }
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Reply::Backend(body) => body.size_hint(),
            Reply::Nothing => hyper::body::SizeHint::with_exact(0),
        }
    }
}
