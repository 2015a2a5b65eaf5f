//! Counters of the HTTP listener and the web page.

gateway_core::counters! {
    "gateway_http_connections_refused_total": "HTTP connections refused or closed for others" {
        /// too many wait
        http_refused_waiting(reason = "waiting");
        /// closed for a newcomer
        http_refused_silent(reason = "silent");
        /// all places of its kind are taken, answered 503
        http_refused_busy(reason = "busy");
        /// the caller has its share of places, answered 429
        http_refused_caller(reason = "caller");
    }
    "gateway_http_api_failures_total": "Requests to the HTTP API that failed" {
        /// answered 400 to 499
        http_api_refused(whose = "client");
        /// answered 500 or more
        http_api_failed(whose = "gateway");
    }
    "gateway_http_bodies_refused_total": "Bodies of HTTP requests that were not read to their end" {
        /// `http.max_body`
        http_bodies_large(reason = "large");
        /// `http.body_timeout`
        http_bodies_late(reason = "late");
    }
    /// `http.cors_origins` names those that may.
    "gateway_http_cross_origin_refused_total": "Requests of pages of other origins to the HTTP API" {
        http_cross_origin;
    }
    "gateway_page_logins_total": "Logins to the web page" {
        page_logins(result = "done");
        /// a token that is none, or has expired
        page_logins_failed(result = "refused");
        /// an address that has tried too many within a minute
        page_logins_limited(result = "too_many");
    }
    /// Stands still while nobody has the overview open.
    "gateway_page_samples_total": "Times that the metrics were read for the charts of the web page" {
        page_samples;
    }
    /// As many as were opened, while nobody looks.
    "gateway_page_live_total": "Live parts of the web page" {
        page_live_opened(state = "opened");
        /// the browser is gone, its tab is hidden, or there is no more
        page_live_ended(state = "ended");
    }
    /// There are 256 logins at most; one more ends the one that was used least recently.
    "gateway_page_logins_evicted_total": "Logins to the web page that ended for others" {
        page_logins_evicted;
    }
    /// Of another site, or of an earlier login.
    "gateway_page_forms_refused_total": "Forms for the web page that it had not made" {
        /// the browser names another origin
        page_refused_origin(reason = "origin");
        /// the form does not bring the login's own token
        page_refused_csrf(reason = "token");
    }
    "gateway_http_connections_failed_total": "HTTP connections that ended with an error, timeouts included" {
        http_failed;
    }
}
