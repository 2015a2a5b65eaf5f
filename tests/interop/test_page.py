"""The web page in a real Chromium: every page for every role, by keyboard, on a phone, in the dark, without script.

tests/gateway/browser.rs starts the gateways: one that asks who calls, with a token of each role in GW_TOKENS, one that asks
nobody (GW_OPEN_HTTP), and one that is in a cluster, where there is a PostgreSQL (GW_CLUSTER_HTTP). One browser serves all tests: who looks is a cookie, which is exchanged between them. Whoever else is
needed at the same time comes by plain HTTP (`Visitor`), as forms do. Whatever a page's policy refuses, and each error in the
console, fails the test that has loaded it.
"""
import contextlib
import html
import http.client
import json
import os
import pathlib
import re
import threading
import urllib.parse

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

import gw

TOKENS = json.loads(os.environ.get("GW_TOKENS", "{}"))
OPEN_PORT = int(os.environ.get("GW_OPEN_HTTP", "0"))
CLUSTER_PORT = int(os.environ.get("GW_CLUSTER_HTTP", "0"))
BASE = f"http://localhost:{gw.PORTS['http']}"
OPEN = f"http://localhost:{OPEN_PORT}"
SHOTS = os.environ.get("GW_SHOTS", "")
ROLES = ["reader", "publisher", "consumer", "operator", "admin"]
# What every role may look at, and what is for the administrator.
PAGES = ["/page/", "/page/devices", "/page/topics", "/page/groups", "/page/bridges", "/page/slow", "/page/certificates",
         "/page/try", "/page/access"]
FOR_ADMIN = ["/page/configuration"]


class Visitor:
    """Somebody who visits the page by plain HTTP, as a browser would: with a cookie, and forms with what they must bring."""

    def __init__(self, token=None, port=None, source=None):
        self.port, self.source, self.cookie = port or gw.PORTS["http"], source, ""
        if token is not None:
            answer = self.login(token)
            assert answer.status == 303, (answer.status, answer.text)
            self.cookie = answer.headers["set-cookie"].split(";")[0]

    def request(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection(
            "localhost", self.port, timeout=gw.WAIT, source_address=(self.source, 0) if self.source else None)
        with contextlib.closing(connection):
            all_headers = {"cookie": self.cookie, **{name.replace("_", "-"): value for name, value in headers.items()}}
            connection.request(method, path, body, all_headers)
            answer = connection.getresponse()
            answer.text = answer.read().decode()
            return answer

    def get(self, path):
        return self.request("GET", path)

    def post(self, path, fields, origin=None, **headers):
        origin = origin or f"http://localhost:{self.port}"
        return self.request("POST", path, urllib.parse.urlencode(fields), origin=origin,
                            content_type="application/x-www-form-urlencoded", **headers)

    def login(self, token):
        return self.post("/page/login", {"token": token, "next": "/page/"})

    def csrf(self, path="/page/try"):
        return html.unescape(re.search(r'name="csrf" value="([^"]*)"', self.get(path).text)[1])

    def metric(self, name):
        """The value of a metric of the gateway that asks nobody."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0


def options():
    chosen = webdriver.ChromeOptions()
    for argument in ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                     "--disable-background-networking", "--disable-component-update", "--disable-sync",
                     "--disable-extensions", "--disable-default-apps", "--no-default-browser-check",
                     "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost", "--window-size=1200,900"]:
        chosen.add_argument(argument)
    chosen.binary_location = os.environ.get("GW_CHROMIUM", "/usr/bin/chromium")
    chosen.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return chosen


@pytest.fixture(scope="session")
def driver():
    service = Service(os.environ.get("GW_CHROMEDRIVER", "/usr/bin/chromedriver"))
    driver = webdriver.Chrome(options=options(), service=service)
    driver.set_page_load_timeout(gw.WAIT)
    yield driver
    driver.quit()


class Browser:
    """The browser, for one test: nobody is logged in, and nothing is emulated."""

    # Logins of roles, which tests share: each is used by one visitor at a time.
    logins = {}

    def __init__(self, driver, base=BASE):
        self.driver, self.base = driver, base
        self.cdp("Network.clearBrowserCookies")
        self.cdp("Emulation.clearDeviceMetricsOverride")
        self.cdp("Emulation.setEmulatedMedia", features=[])
        self.script(True)
        driver.get_log("browser")

    def cdp(self, command, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def script(self, allowed):
        """Whether pages may run script."""
        self.cdp("Emulation.setScriptExecutionDisabled", value=not allowed)

    def check(self):
        """Nothing was refused by the policy, and nothing went wrong in the console."""
        wrong = [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        assert not wrong, wrong

    def get(self, path):
        self.driver.get(self.base + path)
        return self

    def wait(self, done, what=""):
        return WebDriverWait(self.driver, gw.WAIT, poll_frequency=0.05).until(lambda _: done(), what)

    def find(self, selector):
        return self.wait(lambda: next(iter(self.driver.find_elements(By.CSS_SELECTOR, selector)), None), selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector="body"):
        return self.driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def path(self):
        return self.driver.current_url.removeprefix(self.base)

    def as_role(self, role):
        """Is logged in as this role from now on."""
        if role not in self.logins:
            self.logins[role] = Visitor(TOKENS[role]).cookie
        name, value = self.logins[role].split("=", 1)
        self.cdp("Network.setCookie", name=name, value=value, url=self.base + "/page/", path="/page", httpOnly=True,
                 sameSite="Strict")
        return self

    def press(self, selector):
        """Presses a button, and waits for the page that it leads to."""
        old = self.find("html")
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.find(selector))
        self.find(selector).click()
        self.wait(lambda: self._is_gone(old), f"the page after {selector}")
        self.wait(lambda: self.driver.execute_script("return document.readyState") == "complete", "all of that page")

    def _is_gone(self, element):
        try:
            element.is_enabled()
            return False
        except Exception:
            return True

    def shoot(self, name, height=900):
        """A picture, where pictures are wanted: with GW_SHOTS, a directory, as those of docs/images are made."""
        if SHOTS:
            self.cdp("Emulation.setDeviceMetricsOverride", width=1200, height=height, deviceScaleFactor=1, mobile=False)
            self.driver.save_screenshot(str(pathlib.Path(SHOTS) / f"{name}.png"))


@pytest.fixture
def browser(driver):
    """Somebody who is not logged in."""
    visitor = Browser(driver)
    yield visitor
    visitor.check()


@pytest.fixture
def everywhere(driver):
    """As `browser`, at the gateway that asks nobody."""
    visitor = Browser(driver, OPEN)
    yield visitor
    visitor.check()


@pytest.fixture
def clustered(driver):
    """As `everywhere`, at the gateway that is in a cluster."""
    if not CLUSTER_PORT:
        pytest.skip("no PostgreSQL for a ledger")
    visitor = Browser(driver, f"http://localhost:{CLUSTER_PORT}")
    yield visitor
    visitor.check()


@pytest.fixture
def admin(browser):
    return browser.as_role("admin").get("/page/")


@pytest.fixture(params=ROLES)
def visitor(browser, request):
    browser.role = request.param
    return browser.as_role(request.param)


@pytest.fixture
def device():
    with gw.Client(client_id=gw.unique("page")) as client:
        client.ok()
        client.subscribe("to/" + client.client_id, qos=1)
        client.publish(f"room/{client.client_id}/temperature", b"21.5", qos=1)
        yield client


@contextlib.contextmanager
def traffic():
    """Devices that talk to each other, so that charts have something to show; one is too slow for what it asked for."""
    over = threading.Event()
    clients = [gw.Client(client_id=f"{kind}-{number:02}").ok()
               for kind in ("sensor", "valve", "meter") for number in range(1, 7)]
    for client in clients[::2]:
        client.subscribe("plant/+/state", qos=1)

    def talk(number, client):
        turn = number
        while not over.is_set():
            turn += 1
            payload = json.dumps({"value": 20 + (turn * 7 + number) % 30 / 10, "unit": "C"})
            client.publish(f"plant/{client.client_id}/state", payload.encode() * (1 + turn % 3), qos=(turn + number) % 3)
            over.wait(0.05 + (turn % 40) / 200)

    threads = [threading.Thread(target=talk, args=pair, daemon=True) for pair in enumerate(clients)]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        over.set()
        for thread in threads:
            thread.join(gw.WAIT)
        for client in clients:
            client.close()


def test_every_page_for_every_role(visitor):
    for path in PAGES:
        visitor.get(path)
        assert visitor.path().startswith(path) and visitor.text("h1"), path
        assert visitor.role in visitor.text(".who")
        assert not visitor.all(".notice.bad"), (path, visitor.text())
        for link in visitor.all("nav a"):
            assert visitor.role == "admin" or not any(link.get_attribute("href").endswith(path) for path in FOR_ADMIN)
        visitor.check()
    for path in FOR_ADMIN:
        visitor.get(path)
        assert bool(visitor.all(".notice.bad")) == (visitor.role != "admin"), path


def test_what_a_role_may_not_do_is_disabled_and_says_why(visitor, device):
    visitor.get(f"/page/device?id={device.client_id}")
    for action, roles in {"disconnect": ("operator", "admin"), "publish": ("publisher", "admin"), "ban": ("admin",)}.items():
        button = visitor.find(f"button[value={action}]")
        assert button.is_enabled() == (visitor.role in roles), action
        assert visitor.role in roles or visitor.role in button.get_attribute("title")
    visitor.check()


def test_without_a_login_there_is_nothing_but_the_form(browser):
    for path in PAGES + FOR_ADMIN:
        answer = Visitor().get(path)
        assert answer.status == 303 and answer.headers["location"].startswith("/page/login?next="), path
    browser.get("/page/devices")
    assert browser.path().startswith("/page/login?next=")
    browser.find("#token").send_keys("gw_wrong")
    browser.press("main form button")
    assert "not known" in browser.text(".notice")
    # The refused login is an answer with an error code, which the console tells.
    browser.driver.get_log("browser")


def test_a_login_leads_where_one_wanted_to_go_and_a_logout_ends_it(browser, device):
    browser.get(f"/page/device?id={device.client_id}")
    browser.find("#token").send_keys(TOKENS["reader"], Keys.ENTER)
    browser.wait(lambda: browser.path() == f"/page/device?id={device.client_id}")
    cookie = browser.driver.get_cookies()[0]
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and cookie["path"] == "/page"
    assert TOKENS["reader"] not in cookie["value"]
    browser.press("header form button")
    browser.driver.add_cookie(cookie)
    browser.get("/page/")
    assert browser.path().startswith("/page/login"), "the login lasts although its holder has left"


def test_the_overview_grows_while_one_looks(admin, device):
    points = lambda: admin.driver.execute_script(
        "return Math.max(0, ...[...document.querySelectorAll('figure svg polyline')].map(l => l.points.length))")
    with traffic() if SHOTS else contextlib.nullcontext():
        admin.wait(lambda: admin.text("[data-status]") == "live")
        admin.wait(lambda: len(admin.all("figure svg")) >= 6, "charts with two samples")
        device.publish("room/1", b"1", qos=0)
        admin.wait(lambda: admin.all("figure svg polyline"))
        assert "All is well" in admin.text()
        if SHOTS:
            # A sample comes every two seconds.
            WebDriverWait(admin.driver, 120).until(lambda _: points() >= 40)
            admin.shoot("page-overview", height=1300)
            admin.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
            admin.shoot("page-dark", height=1300)
            admin.cdp("Emulation.setEmulatedMedia", features=[])
            admin.cdp("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
            admin.driver.save_screenshot(str(pathlib.Path(SHOTS) / "page-phone.png"))


def test_the_overview_shows_the_cluster_to_those_who_are_in_one(clustered, everywhere):
    clustered.get("/page/")
    clustered.wait(lambda: "left serves, in epoch 1" in clustered.text())
    text = clustered.text()
    assert "nobody stands by" in text and "answers wait" in text, text
    rows = {row.text.split()[0] for row in clustered.all("table tr") if "B" in row.text}
    assert {"state", "records", "log", "files"} <= rows, rows
    clustered.check()
    everywhere.get("/page/")
    assert "in epoch" not in everywhere.text() and "stands by" not in everywhere.text()


def test_a_device_is_shown_live_published_to_and_disconnected(admin, device):
    admin.get("/page/devices?prefix=" + device.client_id)
    admin.press("tbody a")
    assert admin.text("h1") == device.client_id and "to/" + device.client_id in admin.text()
    assert "21.5" in admin.text()
    admin.wait(lambda: admin.text("[data-status]") == "live")
    device.publish("room/<b>live</b>", b"<script>alert(1)</script>", qos=1)
    admin.wait(lambda: "<script>alert(1)</script>" in admin.text("#messages"), "the message as text")
    admin.shoot("page-device")
    admin.find("form input[name=topic]").send_keys("to/" + device.client_id)
    admin.find("textarea[name=payload]").send_keys("hello")
    admin.press("button[value=publish]")
    assert "acknowledged" in admin.text(".notice.good"), admin.text()
    assert device.message().payload == b"hello"
    admin.press("button[value=disconnect]")
    assert "ended" in admin.text(".notice.good")
    device.ended()
    admin.wait(lambda: "has a session" in admin.get(f"/page/device?id={device.client_id}").text(), "the end of the session")


def test_a_device_is_commanded_banned_emptied_and_deleted(admin, device):
    where = f"/page/device?id={device.client_id}"
    admin.get(where)
    device.subscribe(f"cmd/{device.client_id}/#", qos=1)

    def reply(_client, _userdata, message):
        if message.topic.endswith("/blink"):
            device.paho.publish(message.topic.rpartition("/")[0] + "/reply/200", b"blinked", qos=1)

    device.paho.on_message = reply
    admin.find("input[name=name]").send_keys("blink")
    admin.press("button[value=command]")
    assert "status 200: blinked" in admin.text(".notice.good"), admin.text()

    opened = lambda: admin.driver.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    opened()
    admin.press("button[value=purge]")
    assert "0 messages were dropped" in admin.text(".notice.good")
    opened()
    admin.find("input[name=reason]").send_keys("tried out")
    admin.press("button[value=ban]")
    assert "Banned for 24 hours" in admin.text(".notice.good")
    device.ended()
    assert gw.Client(client_id=device.client_id).connect()[1].is_failure, "it is banned"
    admin.get("/page/access")
    row = next(row for row in admin.all("tbody tr") if device.client_id in row.text)
    assert "tried out" in row.text
    button = row.find_element(By.CSS_SELECTOR, "button[value=unban]")
    admin.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    admin.wait(lambda: "removed" in admin.text(".notice.good"))
    with gw.Client(client_id=device.client_id) as back:
        back.ok()
    admin.get(where)
    assert "21.5" in admin.text()
    opened()
    admin.press("button[value=delete]")
    assert "1 latest values" in admin.text(".notice.good"), admin.text()
    assert "21.5" not in admin.get(where).text()


def test_of_long_lists_it_is_said_that_there_is_more(admin, device):
    device.subscribe_many([(f"many/{number:03}", 0) for number in range(129)])
    for number in range(60):
        device.publish(f"room/{device.client_id}/{number:02}", b"1", qos=1)
    admin.get(f"/page/device?id={device.client_id}")
    assert "The first 100 of 130." in admin.text() and "many/128" not in admin.text()
    assert "The first 50." in admin.text()
    admin.press("a[href*='subscriptions=']")
    assert "30 of 130." in admin.text() and "many/128" in admin.text() and "many/000" not in admin.text()
    admin.press("a[href^='/page/topics?device=']")
    admin.wait(lambda: len(admin.all("main details, main td")) >= 1)
    opened = "document.querySelectorAll('details').forEach(d => d.open = true)"
    admin.driver.execute_script(opened)
    assert "59" in admin.text()


def test_a_reader_sees_a_topic_and_a_group_and_changes_nothing(browser, device, backend):
    modules, channel, who = backend
    groups, stub = modules["groups"], modules["groups_grpc"]
    name = gw.unique("g")
    group = groups.Group(name=name, filter=groups.Filter(topic_filters=[f"{name}/#"]))
    stub.GroupsStub(channel).CreateGroup(groups.CreateGroupRequest(group=group), metadata=who)
    device.publish(f"{name}/x", b"22.25", qos=1, retain=True)
    reader = browser.as_role("reader")
    for path, actions in [(f"/page/topic?name={name}/x", ["retain", "clear"]), (f"/page/group?name={name}", ["seek", "pause"])]:
        reader.get(path)
        assert not reader.all(".notice.bad"), reader.text()
        for action in actions:
            button = reader.find(f"button[value={action}]")
            assert not button.is_enabled() and "role reader" in button.get_attribute("title"), (path, action)
        posted = Visitor(TOKENS["reader"])
        said = posted.post(path, {"csrf": posted.csrf(), "do": actions[0], "to": "latest", "payload": "x"})
        assert "role reader" in said.text, said.text
    assert "22.25" in reader.get(f"/page/topic?name={name}/x").text()
    stub.GroupsStub(channel).DeleteGroup(groups.DeleteGroupRequest(name=name), metadata=who)


def test_by_keyboard_alone(browser):
    browser.get("/page/login")
    active = lambda: browser.driver.switch_to.active_element
    assert active().get_attribute("id") == "token", "the field has the focus"
    active().send_keys(TOKENS["reader"], Keys.ENTER)
    browser.wait(lambda: browser.path() == "/page/")
    browser.find("body").send_keys(Keys.TAB)
    assert "skip" in active().get_attribute("class") and active().is_displayed()
    active().send_keys(Keys.ENTER)
    browser.wait(lambda: active().get_attribute("id") == "main", "the content has the focus")
    browser.get("/page/devices")
    seen = []
    for _ in range(40):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        element = active()
        seen.append(element.get_attribute("name") or element.get_attribute("href") or element.tag_name)
    for wanted in ["prefix", "version", "listener", "online"]:
        assert wanted in seen, seen
    outline = browser.driver.execute_script(
        "const e = document.querySelector('input[name=prefix]'); e.focus(); return getComputedStyle(e).outlineStyle")
    assert outline == "solid"


def test_a_device_is_disconnected_by_keyboard_alone(browser, device):
    browser.as_role("operator").get(f"/page/device?id={device.client_id}")
    active = lambda: browser.driver.switch_to.active_element
    for _ in range(200):
        active().send_keys(Keys.TAB)
        if active().get_attribute("value") == "disconnect":
            break
    old = browser.find("html")
    active().send_keys(Keys.ENTER)
    browser.wait(lambda: browser._is_gone(old))
    browser.wait(lambda: "ended" in browser.text(".notice.good"))
    device.ended()


def test_every_field_has_a_label(admin, device):
    for path in PAGES + FOR_ADMIN + [f"/page/device?id={device.client_id}"]:
        admin.get(path)
        bare = admin.driver.execute_script(
            "return [...document.querySelectorAll('input:not([type=hidden]), select, textarea')]"
            ".filter(e => !e.labels.length && !e.ariaLabel).map(e => e.outerHTML)")
        assert not bare, (path, bare)
        assert admin.driver.execute_script("return document.documentElement.lang") == "en"
        assert len(admin.all("h1")) == 1


def test_on_a_phone_nothing_is_wider_than_the_screen(admin, device):
    admin.cdp("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    # As long as a name may be, and nowhere to break it.
    name = "w" * 250
    device.publish(f"{name}/{name}", b"x" * 3000, qos=1)
    with gw.Client(client_id=name) as long:
        long.ok().subscribe(f"{name}/#", qos=1)
        for path in PAGES + FOR_ADMIN + [f"/page/device?id={device.client_id}", f"/page/device?id={name}",
                                         f"/page/packets?id={name}", f"/page/topic?name={name}/{name}",
                                         f"/page/topics?filter={name}/%23"]:
            admin.get(path)
            width = admin.driver.execute_script("return document.documentElement.scrollWidth")
            assert width <= 360, (path, width)


def luminance(colour):
    r, g, b = [int(float(part)) for part in colour.split("(")[1].rstrip(")").split(",")[:3]]
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_in_the_dark_it_is_dark(admin):
    colours = ("return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    for scheme in ["light", "dark"]:
        admin.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        back, text = map(luminance, admin.driver.execute_script(colours))
        assert (back < 60 and text > 180) if scheme == "dark" else (back > 200 and text < 80), (scheme, back, text)


def test_all_but_what_is_live_works_without_script(browser, device):
    browser.script(False)
    browser.get("/page/login")
    browser.find("#token").send_keys(TOKENS["admin"], Keys.ENTER)
    browser.wait(lambda: browser.path() == "/page/")
    body = lambda: browser.driver.page_source
    assert "Connections" in body() and "live with script" in body()
    browser.get(f"/page/device?id={device.client_id}")
    browser.find("form input[name=topic]").send_keys("to/" + device.client_id)
    browser.find("textarea[name=payload]").send_keys("plain")
    browser.find("button[value=publish]").click()
    browser.wait(lambda: "acknowledged" in body())
    assert device.message().payload == b"plain"
    browser.script(True)


def test_a_gateway_that_asks_nobody_says_so(everywhere):
    for path in PAGES + FOR_ADMIN:
        answer = Visitor(port=OPEN_PORT).get(path)
        assert answer.status == 200 and "asks nobody" in answer.text, path
    everywhere.get("/page/")
    assert "asks nobody" in everywhere.text(".who") and not everywhere.all("header form")


def test_a_form_of_another_origin_is_refused(everywhere, device):
    # The page's own policy would keep the form at home; a page of somebody else has no such policy.
    everywhere.driver.get("data:text/html,<form method=post action='" + OPEN + "/page/device?id=" + device.client_id
                          + "'><input name=do value=disconnect><button>go</button></form>")
    everywhere.find("button").click()
    everywhere.wait(lambda: "not sent from this page" in everywhere.text())
    everywhere.driver.get_log("browser")


def test_topics_are_a_tree_with_a_chart_and_a_retained_editor(admin, device):
    name = f"room/{device.client_id}/temperature"
    admin.get(f"/page/topics?filter=room/{device.client_id}/%23")
    assert "21.5" in admin.find("ul.tree").get_attribute("textContent")
    admin.get(f"/page/topic?name={name}")
    admin.wait(lambda: admin.text("section[data-live] [data-status]") == "live")
    for value in (b"20", b"22.25"):
        device.publish(name, value, qos=1)
    admin.wait(lambda: admin.all("#chart svg polyline"), "a chart of numbers")
    assert "22.25" in admin.text("#messages")
    admin.shoot("page-topic")
    admin.find("details summary").click()
    admin.find("textarea[name=payload]").send_keys("kept")
    admin.press("button[value=retain]")
    assert "kept" in admin.text() and "retained" in admin.text(".notice.good")
    admin.press("button[value=clear]")
    assert "deleted" in admin.text(".notice.good")


def test_what_is_tried_out_is_seen(admin):
    mark = gw.unique("mark")
    admin.get(f"/page/try?filter={mark}/%2B")
    admin.wait(lambda: admin.text("[data-status]") == "live")
    assert f"{mark}/+" in Visitor(TOKENS["operator"]).get("/page/slow").text, "an open stream is not among the slow consumers"
    other = Visitor(TOKENS["publisher"])
    said = other.post("/page/try", {"csrf": other.csrf(), "do": "publish", "topic": mark + "/x", "payload": "tried"})
    assert "was sent" in said.text, said.text
    admin.wait(lambda: "tried" in admin.text("#messages"))
    admin.shoot("page-try")


@pytest.fixture(scope="module")
def backend():
    """The API itself, for what the page does not make."""
    import grpc
    from test_grpc import generate
    modules = generate()
    credentials = grpc.ssl_channel_credentials(pathlib.Path(gw.CA).read_bytes())
    with grpc.secure_channel(f"{gw.HOST}:{gw.PORTS['grpc']}", credentials) as channel:
        yield modules, channel, [("authorization", "Bearer " + TOKENS["admin"])]


def test_a_group_is_shown_moved_and_its_dead_letters_put_back(admin, device, backend):
    modules, channel, who = backend
    groups, stub = modules["groups"], modules["groups_grpc"]
    name = gw.unique("g")
    group = groups.Group(name=name, max_attempts=1, filter=groups.Filter(topic_filters=[f"{name}/#"]))
    stub.GroupsStub(channel).CreateGroup(groups.CreateGroupRequest(group=group), metadata=who)
    for number in range(3):
        device.publish(f"{name}/{number}", b"work", qos=1)
    # Groups hear of messages after their publishers do.
    rows = lambda: [row.text for row in admin.get("/page/groups").all("tbody tr") if name in row.text]
    admin.wait(lambda: any(" 3 " in row for row in rows()), "3 messages that wait")
    consumer = stub.ConsumerStub(channel)
    fetched = consumer.Fetch(groups.FetchRequest(group=name, member_id="m", max_messages=1, wait={"seconds": 20}), metadata=who)
    consumer.ModifyLease(groups.ModifyLeaseRequest(
        group=name, ack_ids=[fetched.messages[0].ack_id], deadline={"seconds": 0}, reason="broken"), metadata=who)
    admin.wait(lambda: "broken" in admin.get(f"/page/group?name={name}").text(), "the dead letter")
    admin.shoot("page-group")
    admin.press("section:last-of-type button[value=requeue]")
    assert "put back" in admin.text(".notice.good"), admin.text()
    Select(admin.find("select[name=to]")).select_by_value("earliest")
    admin.press("button[value=seek]")
    assert "moved" in admin.text(".notice.good"), admin.text()
    admin.press("button[value=pause]")
    assert "paused" in admin.text()
    admin.press("button[value=resume]")
    assert "Delivery goes on" in admin.text(".notice.good"), admin.text()
    fetched = consumer.Fetch(groups.FetchRequest(group=name, member_id="m", max_messages=1, wait={"seconds": 20}), metadata=who)
    consumer.ModifyLease(groups.ModifyLeaseRequest(
        group=name, ack_ids=[fetched.messages[0].ack_id], deadline={"seconds": 0}, reason="second break"), metadata=who)
    # The prose of the page has "again" in it, whatever waits.
    admin.wait(lambda: "second break" in admin.get(f"/page/group?name={name}").text(), "another dead letter")
    admin.press("section:last-of-type button[value=purge]")
    assert "1 dead letters were deleted" in admin.text(".notice.good"), admin.text()


def test_rules_tokens_and_bans(admin, device):
    admin.get("/page/access")
    assert "allow publish and subscribe" in admin.text("[aria-label=Rules]") and "$SYS/#" in admin.text("[aria-label=Rules]")
    assert "What none names is denied" in admin.text()
    admin.press("button[value=reload]")
    assert "rules" in admin.text(".notice"), admin.text()
    admin.find("input[name=device]").send_keys(device.client_id)
    admin.find("input[name=topic]").send_keys("room/1")
    admin.press("button[value=explain]")
    assert admin.all(".notice"), admin.text()
    note = gw.unique("note")
    admin.driver.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    admin.find("input[name=note]").send_keys(note)
    admin.press("button[value=create]")
    secret = admin.text("#secret")
    holder = Visitor(secret)
    assert "reader" in holder.get("/page/").text
    row = next(row for row in admin.all("tbody tr") if note in row.text)
    button = row.find_element(By.CSS_SELECTOR, "button[value=revoke]")
    admin.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    admin.wait(lambda: "revoked" in admin.text(".notice.good"))
    assert holder.get("/page/devices").headers["location"].startswith("/page/login"), "the login outlives its token"


def test_devices_by_the_thousand_are_paged(browser):
    """As many as GW_DEVICES, whose page load times are written to GW_TIMES, if that names a file: docs/page.md has the command."""
    import socket
    import time
    count = int(os.environ.get("GW_DEVICES", "200"))
    for number in range(count):
        name = f"many-{number:06}".encode()
        with socket.create_connection((gw.HOST, gw.PORTS["tcp"])) as stream:
            head = b"\x00\x04MQTT\x04\x00\x00\x00" + len(name).to_bytes(2, "big") + name
            stream.sendall(b"\x10" + bytes([len(head)]) + head + b"\xe0\x00")
            assert stream.recv(4)[:1] == b"\x20"
    browser.as_role("reader")
    for path in ["/page/devices?prefix=many-", "/page/devices", "/page/slow", "/page/"]:
        took = []
        for _ in range(3):
            start = time.monotonic()
            browser.get(path)
            took.append(round((time.monotonic() - start) * 1000))
        if times := os.environ.get("GW_TIMES"):
            with open(times, "a") as file:
                print(f"{count} devices, {path}: {took} ms", file=file)
    browser.get("/page/devices?prefix=many-")
    assert len(browser.all("tbody tr")) == 50
    seen = {row.text.split()[0] for row in browser.all("tbody tr")}
    browser.press("a[rel=next]")
    assert not seen & {row.text.split()[0] for row in browser.all("tbody tr")}


def test_bridges_are_shown_paused_and_resumed(admin, device):
    """One leads to the other gateway, one to nobody: tests/gateway/browser.rs."""
    shown = lambda name: next(box.text for box in admin.get("/page/bridges").all("main section") if box.text.startswith(name))
    admin.wait(lambda: "State\nup" in shown("cloud"), "a bridge that is up")
    down = admin.wait(lambda: (text := shown("hooks")) and "State\ndown" in text and text, "a bridge that is down")
    assert "failures in a row" in down and "tried again at" in down and "connect: " in down, down
    device.publish("room/bridged", b"1", qos=1)
    admin.wait(lambda: "Sent\n0 messages" not in shown("cloud"), "what the bridge has carried")
    admin.wait(lambda: "Waits on disk\n0 messages" not in shown("hooks"), "what waits for a bridge that is away")
    admin.shoot("page-bridges")
    card = "section[aria-labelledby=bridge-cloud] "
    admin.press(card + "button[value=pause]")
    assert "paused" in admin.text(card) and "is paused" in admin.text(".notice.good")
    reader = Visitor(TOKENS["reader"])
    assert "not for the role reader" in reader.get("/page/bridges").text
    said = reader.post("/page/bridges", {"csrf": reader.csrf(), "do": "resume", "bridge": "cloud"})
    assert "role reader" in said.text and "paused" in admin.get("/page/bridges").text(card)
    admin.press(card + "button[value=resume]")
    assert "paused" not in admin.text(card)


def test_packets_of_a_device_are_seen_as_they_come_and_go(browser, device):
    browser.as_role("reader").get(f"/page/device?id={device.client_id}")
    assert not browser.all("a[href^='/page/packets']")
    browser.get(f"/page/packets?id={device.client_id}")
    assert "role reader" in browser.text(".notice.bad")
    browser.as_role("operator").get(f"/page/device?id={device.client_id}")
    browser.press("a[href^='/page/packets']")
    live = lambda: browser.wait(lambda: browser.text("[data-status]") == "live")
    live()
    rows = lambda: [row.text for row in browser.all("#packets tr")]
    # Whether the trace has begun is seen by its first packet.
    browser.wait(lambda: device.publish("room/<b>x</b>", b"payload that is not shown", qos=1) or rows(), "a packet")
    browser.wait(lambda: any("PUBACK" in row for row in rows()))
    publish = next(row for row in rows() if "PUBLISH" in row)
    assert "the device" in publish and "room/<b>x</b>" in publish and "25 B" in publish and "not shown" not in publish
    browser.find("input[name=payloads]").click()
    browser.press("main form button")
    live()
    browser.wait(lambda: device.publish("room/1", b"<i>shown</i>", qos=0) or "<i>shown</i>" in browser.text("#packets"))
    for qos in (1, 2):
        device.publish(f"to/{device.client_id}", b'{"on": true}', qos=qos)
        device.publish("room/1", b"21.5", qos=qos)
    browser.wait(lambda: any("PUBCOMP" in row for row in rows()), "both directions")
    browser.shoot("page-packets", height=800)


EVIL = "\"><img src=x onerror=alert(1)><script>alert(2)</script>'{{}}"


def test_whatever_devices_are_called_it_is_text(admin):
    topic, name = f"evil/{EVIL}", "evil" + EVIL
    properties = gw.publish_properties(UserProperty=[(EVIL, EVIL)], ContentType=EVIL, ResponseTopic="evil/answer")
    with gw.Client(client_id=name) as evil:
        evil.paho.username_pw_set(EVIL, "x")
        evil.ok().subscribe(topic, qos=1)
        evil.publish(topic, EVIL.encode(), qos=1, retain=True, properties=properties)
        quoted, quoted_topic = urllib.parse.quote(name), urllib.parse.quote(topic)
        pages = [f"/page/devices?prefix={quoted}", f"/page/device?id={quoted}", f"/page/packets?id={quoted}",
                 f"/page/topics?filter={quoted_topic}&device={quoted}", f"/page/topic?name={quoted_topic}&field={quoted}",
                 f"/page/group?name={quoted}", f"/page/slow?by={quoted}", f"/page/try?filter={quoted_topic}",
                 f"/page/configuration?key={quoted}", "/page/access", "/page/"]
        for path in pages:
            admin.get(path)
            assert not admin.all("img, main script, [onerror]"), path
            if admin.all("[data-live]"):
                admin.wait(lambda: admin.text("[data-status]") != "connecting" and admin.text("[data-status]"))
                evil.publish(topic, EVIL.encode(), qos=1)
                assert not admin.all("img, main script, [onerror]"), path
    Visitor(TOKENS["admin"]).post(f"/page/topic?name={quoted_topic}", {"do": "clear"})
    # A group of such a name is not found, which the console tells.
    admin.driver.get_log("browser")


def test_no_form_is_taken_without_what_it_must_bring():
    """Every path of the source that takes a form, so that a new one is not forgotten."""
    source = (pathlib.Path(__file__).parents[2] / "crates/http/src/page/mod.rs").read_text()
    paths = re.findall(r'route\("(/page/\w+)", (?:get\(.*?\)\.|axum::routing::)post\(', source)
    assert len(paths) >= 8, paths
    visitor = Visitor(TOKENS["admin"])
    csrf, cookie = visitor.csrf(), visitor.cookie
    own = f"http://localhost:{visitor.port}"
    for path in paths:
        for what, fields, headers in [
            ("of another site", {"csrf": csrf}, {"origin": "http://evil.example"}),
            ("of a sandbox", {"csrf": csrf}, {"origin": "null"}),
            ("of another port", {"csrf": csrf}, {"origin": "http://localhost:1"}),
            ("without its token", {}, {"origin": own}),
            ("with an empty token", {"csrf": ""}, {"origin": own}),
            ("with another's token", {"csrf": Visitor(TOKENS["reader"]).csrf()}, {"origin": own}),
        ]:
            if path == "/page/login" and headers["origin"] == own:
                continue
            answer = visitor.post(path, {**fields, "do": "create", "token": TOKENS["admin"]}, **headers)
            assert answer.status == 403 and "set-cookie" not in answer.headers, (path, what, answer.status)
    visitor.cookie = ""
    for path in paths:
        if path != "/page/login":
            answer = visitor.post(path, {"csrf": csrf})
            assert answer.status == 303 and answer.headers["location"].startswith("/page/login"), path
    visitor.cookie = cookie
    assert visitor.get("/page/").status == 200, "one of them was taken for a logout"


def test_forms_are_bounded_and_of_their_kind():
    visitor = Visitor(TOKENS["admin"])
    csrf = visitor.csrf()
    big = visitor.post("/page/try", {"csrf": csrf, "payload": "x" * (256 << 10)})
    assert big.status == 413, big.status
    strange = visitor.request("POST", "/page/try", "csrf=" + csrf, origin=f"http://localhost:{visitor.port}",
                              content_type="text/plain")
    assert strange.status == 415, strange.status
    unknown = Visitor().login("x" * (40 << 10))
    assert unknown.status == 413, unknown.status


def test_every_answer_has_the_headers_that_keep_it_safe():
    visitor = Visitor(TOKENS["admin"])
    for path in PAGES + FOR_ADMIN + ["/page/login", "/page/device?id=nobody"]:
        headers = visitor.get(path).headers
        policy = headers["content-security-policy"]
        for directive in ["default-src 'none'", "script-src 'self'", "style-src 'self'", "form-action 'self'",
                          "frame-ancestors 'none'", "base-uri 'none'"]:
            assert directive in policy, (path, policy)
        assert "unsafe" not in policy and headers["x-content-type-options"] == "nosniff", path
        assert headers["cache-control"] == "no-store" and headers["referrer-policy"] == "same-origin", path
    for other in ["//evil.example", "https://evil.example/page/", "/page//evil.example", "/page/\\evil.example", "/page/\t/x"]:
        answer = Visitor().post("/page/login", {"token": TOKENS["reader"], "next": other})
        leads = urllib.parse.urlsplit(urllib.parse.urljoin(BASE + "/page/login", answer.headers["location"]))
        assert answer.status == 303 and f"{leads.scheme}://{leads.netloc}" == BASE, (other, answer.headers["location"])


def test_tokens_are_not_tried_by_the_thousand():
    """From an address of its own, so that the tests that log in are left alone."""
    stranger = Visitor(source="127.0.0.9")
    answers = [stranger.login("gw_" + str(number)).status for number in range(25)]
    assert answers[:20] == [403] * 20 and set(answers[20:]) == {429}, answers
    late = stranger.login(TOKENS["admin"])
    assert late.status == 429 and 0 < int(late.headers["retry-after"]) <= 60
    assert Visitor(TOKENS["reader"]).get("/page/").status == 200, "another address is kept out, too"


def test_nothing_is_read_for_charts_once_nobody_looks(everywhere, monkeypatch):
    """What is counted is work: samples, and live parts that are open."""
    who = Visitor(port=OPEN_PORT)
    samples = lambda: who.metric("gateway_page_samples_total")
    opened = lambda: who.metric('gateway_page_live_total{state="opened"}')
    ended = lambda: who.metric('gateway_page_live_total{state="ended"}')
    before = samples()
    everywhere.get("/page/")
    everywhere.wait(lambda: samples() >= before + 2, "samples while somebody looks")
    everywhere.driver.get("about:blank")
    everywhere.wait(lambda: opened() > 0 and opened() == ended(), "the end of what was open")
    after = samples()
    monkeypatch.setitem(gw.PORTS, "tcp", int(os.environ["GW_OPEN_TCP"]))
    with gw.Client() as client:
        client.ok()
        for number in range(300):
            client.publish(f"idle/{number}", b"x", qos=1)
    for path in ["/page/devices", "/page/topics", "/page/groups", "/page/bridges", "/page/slow", "/page/try"]:
        assert who.get(path).status == 200
    assert (samples(), opened()) == (after, ended()), "something is read although nobody looks"
