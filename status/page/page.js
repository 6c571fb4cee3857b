// Draws /status.json once a second. No library; all that comes from requests is set as text, never as markup.
'use strict';

// As the server keeps them: a point a second for ten minutes, and one for ten seconds for an hour.
const kept = 600, keptSteps = 360;
let points = [], hour = [], hours = new Map(), version = '';
let chosenSpan = '', at = null;   // which of both is shown, '' until somebody chooses; the second that is pointed at

const byId = id => document.getElementById(id);
const svgNS = 'http://www.w3.org/2000/svg';

function el(name, attributes, ...children) {
  const e = document.createElement(name);
  for (const [k, v] of Object.entries(attributes || {})) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

function svg(name, attributes, ...children) {
  const e = document.createElementNS(svgNS, name);
  for (const [k, v] of Object.entries(attributes || {})) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

const count = v => v >= 1e6 ? (v / 1e6).toFixed(1) + 'M' : v >= 1e4 ? (v / 1e3).toFixed(0) + 'k' : v >= 1000 ? (v / 1e3).toFixed(1) + 'k'
  : v >= 10 || Number.isInteger(v) ? v.toFixed(0) : v < 0.095 ? v.toFixed(2) : v.toFixed(1);   // one request in a minute is not none
const ms = v => v === 0 ? '–' : v >= 1e4 ? (v / 1e3).toFixed(0) + ' s' : v >= 1000 ? (v / 1e3).toFixed(1) + ' s' : v >= 10 ? v.toFixed(0) + ' ms'
  : v >= 0.1 ? v.toFixed(1) + ' ms' : (v * 1000).toFixed(0) + ' µs';
// percentiles are interpolated in buckets a quarter wide
const about = v => v === 0 ? ms(v) : '~' + ms(v);
// prices are seconds, and may be below nothing
const price = v => v < 0 ? '−' + ms(-1000 * v) : ms(1000 * v);
const percent = v => (100 * v).toFixed(0) + ' %';
const fromNano = v => ms(v / 1e6);

function tiles(m, status) {
  const prompt = m.cached + m.computed;
  const all = [
    ['requests / s', count(m.ok + m.rejected + m.failed + m.gone)],
    ['failed / s', count(m.failed), m.failed > 0 ? 'c-bad' : ''],
    ['refused / s', count(m.refused)],
    ...m.first_token_50 > 0 ? [['first token p50', about(m.first_token_50)], ['first token p99', about(m.first_token_99)],
      ['per token p50', about(m.per_token_50 || 0)]]
      : [['answer headers p50', about(m.first_byte_50)], ['answer headers p99', about(m.first_byte_99)]],
    ...m.answer_tokens > 0 ? [['answer tokens / s', count(m.answer_tokens)]] : [],
    ...m.judged > 0 ? [['targets kept', percent((m.kept || 0) / m.judged)]] : [],
    ['over two hops', m.split + m.alone > 0 ? percent(m.split / (m.split + m.alone)) : '–'],
    ['prompt cached', prompt > 0 ? percent(m.cached / prompt) : '–'],
    ['to decide p99', about(m.decide_99)],
    ['booked now', count(status.reservations)],
  ];
  byId('tiles').replaceChildren(...all.map(([name, value, css]) => el('div', { class: 'tile ' + (css || '') }, el('b', {}, value), el('small', {}, name))));
}

const shown = new Map();   // the data of parts

// show draws a part anew if its data changed, or a screen reader would read it out once a second.
function show(id, data, drawn) {
  const text = JSON.stringify(data);
  if (shown.get(id) === text) return;
  shown.set(id, text);
  replace(byId(id), drawn(data));
}

// replace draws a part anew. The focus, and how far a table is scrolled, stay: elements are known by their key.
function replace(box, children) {
  const scrolled = new Map([...box.querySelectorAll('[data-key]')].map(e => [e.dataset.key, e.scrollLeft]));
  const focus = box.contains(document.activeElement) && document.activeElement.dataset.key;
  box.replaceChildren(...children);
  for (const e of box.querySelectorAll('[data-key]')) {
    e.scrollLeft = scrolled.get(e.dataset.key) || 0;
    if (e.dataset.key === focus) e.focus({ preventScroll: true });
  }
}

// attention shows what an operator should look at first, each with a page that says what to do.
function attention(notices) {
  if (!notices.length) return [el('p', { class: 'notice good' }, 'Nothing needs attention.')];
  return notices.map(n => el('p', { class: 'notice ' + (n.bad ? 'bad' : 'warn') },
    el('b', {}, n.bad ? 'Problem: ' : 'Warning: '), n.text + ' ', el('a', { href: 'docs/' + n.doc, 'data-key': n.doc }, 'What to do')));
}

const cached = p => p.cached + p.computed > 0 ? p.cached / (p.cached + p.computed) : 0;
// What SREs look at first. A chart that is about time has gaps where nothing was measured.
const charts = () => [
  hour.some(p => p.first_token_50 > 0) || points.some(p => p.first_token_50 > 0)
    ? { title: 'Time to the first token', unit: about, lines: [['p50', 'first_token_50', 'c-decode'], ['p99', 'first_token_99', 'c-bad']] }
    : { title: 'Time to the answer’s headers', unit: about, lines: [['p50', 'first_byte_50', 'c-decode'], ['p99', 'first_byte_99', 'c-bad']] },
  { title: 'Time per token after the first', unit: about, lines: [['mean, as engines report it', 'each', 'c-decode'],
    ...hour.some(p => p.per_token_50 > 0) || points.some(p => p.per_token_50 > 0) ? [['p50 of requests', 'per_token_50', 'c-other']] : []] },
  { title: 'Requests a second', unit: count, lines: [['two hops', 'split', 'c-decode'], ['decode alone', 'alone', 'c-prefill'], ['passed on', 'pass', 'c-other']] },
  { title: 'Failures a second', unit: count, lines: [['failed', 'failed', 'c-bad'], ['refused, by engines too', p => p.rejected + p.refused, 'c-prefill'],
    ['planned again', 'replans', 'c-decode'], ['client left', 'gone', 'c-other']] },
  { title: 'Requests at engines', unit: count, lines: [['in batches', 'running', 'c-decode'], ['in engines’ queues', 'waiting', 'c-prefill'], ['waiting in Tandem', 'queued', 'c-bad']] },
  { title: 'Prompt tokens that were cached', unit: percent, most: 1, gaps: true, lines: [['at prefill', cached, 'c-good']] },
];
const moreCharts = [
  { title: 'Tokens a second', unit: count, lines: [['of prompts, cached', 'cached', 'c-good'], ['computed', 'computed', 'c-prefill'], ['of answers', 'written', 'c-decode']] },
  { title: 'Prefill hop', unit: about, lines: [['p50', 'prefill_50', 'c-decode'], ['p99', 'prefill_99', 'c-bad']] },
  { title: "Tandem's own time", unit: about, lines: [['p50', 'decide_50', 'c-decode'], ['p99', 'decide_99', 'c-bad']] },
];

// clock is a time of day, of 24 hours as in logs and in tandem requests. n: seconds.
const clock = (n, seconds) => new Date(1000 * n).toLocaleTimeString([], { hourCycle: 'h23', hour: '2-digit', minute: '2-digit', ...seconds ? { second: '2-digit' } : {} });

// ticks are round numbers from 0 to the first one that is not below max.
function ticks(max) {
  const power = 10 ** Math.floor(Math.log10(max / 3)), step = [1, 2, 5, 10].find(m => m * power >= max / 3) * power;
  return Array.from({ length: Math.ceil(max / step - 1e-9) + 1 }, (_, i) => i * step);
}

const spanShown = () => chosenSpan || (hour.length < 30 ? 'minutes' : 'hour');   // an hour of which little has passed says little

// nearest returns the index of the point nearest to a second.
function nearest(data, n) {
  let best = 0;
  data.forEach((p, i) => { if (Math.abs(p.n - n) < Math.abs(data[best].n - n)) best = i; });
  return best;
}

const chartSize = { w: 360, h: 130, left: 50, right: 6, bottom: 18, top: 6 };

function chart(c, data) {
  const { w, h, left, right, bottom, top } = chartSize, n = data.length;
  const values = c.lines.map(([, get]) => data.map(p => (typeof get === 'function' ? get(p) : p[get]) || 0));
  const marks = c.most ? [0, c.most / 2, c.most] : ticks(Math.max(c.unit === about ? 0.1 : 0.3, ...values.flat())), max = marks.at(-1);
  const t1 = n ? data[n - 1].n : 0, t0 = n ? Math.min(data[0].n, t1 - 60) : 0;
  const x = t => left + (w - left - right) * (t - t0) / (t1 - t0 || 1), y = v => top + (h - top - bottom) * (1 - v / max);
  const here = n ? at === null ? n - 1 : nearest(data, at) : -1;
  const said = i => here < 0 ? '' : c.unit(values[i][here]);
  const picture = svg('svg', { viewBox: `0 0 ${w} ${h}`, role: 'img', 'data-from': t0, 'data-to': t1,
    'aria-label': `${c.title}, ${at === null ? 'now' : clock(data[here].n, true)}: ${c.lines.map(([name], i) => `${name} ${said(i) || 'unknown'}`).join(', ')}` });
  for (const v of marks) picture.append(svg('line', { class: 'axis', x1: left, x2: w - right, y1: y(v), y2: y(v) }),
    svg('text', { x: left - 5, y: y(v) + 4, 'text-anchor': 'end' }, v === 0 ? '0' : (c.unit === about ? ms : c.unit)(v)));
  const every = [10, 30, 60, 120, 300, 600, 900].find(s => (t1 - t0) / s <= 4.5) || 900;
  for (let t = Math.ceil(t0 / every) * every, end = 0; n && t <= t1; t += every) {
    const text = clock(t, every < 60), half = 3.2 * text.length;   // of its width
    const middle = Math.min(Math.max(x(t), half), w - half);
    picture.append(svg('line', { class: 'axis', x1: x(t), x2: x(t), y1: h - bottom, y2: h - bottom + 3 }));
    if (middle - half < end) continue;   // it would lie on the last one
    picture.append(svg('text', { x: middle, y: h - 4, 'text-anchor': 'middle' }, text));
    end = middle + half;
  }
  const apart = 2.5 * (spanShown() === 'hour' ? 10 : 1);   // seconds without a point: the page was not shown
  values.forEach((line, i) => {
    const there = k => c.unit !== about && !c.gaps || line[k] > 0;   // a time of nothing is a gap
    const d = line.map((v, k) => there(k) ? (k && there(k - 1) && data[k].n - data[k - 1].n <= apart ? 'L' : 'M') + x(data[k].n).toFixed(1) + ' ' + y(Math.min(v, max)).toFixed(1)
      + (!there(k + 1) && !(k && there(k - 1)) ? 'h.01' : '') : '').join('');   // one alone is a dot
    if (d) picture.append(svg('path', { class: 'series ' + c.lines[i][2], d }));
  });
  if (at !== null && n) picture.append(svg('line', { class: 'at', x1: x(data[here].n), x2: x(data[here].n), y1: top, y2: h - bottom }));
  return el('figure', { tabindex: '0', 'data-key': c.title, 'aria-label': c.title }, el('figcaption', {}, el('b', {}, c.title),
    ...c.lines.map(([name, , css], i) => el('span', { class: 'key ' + css }, `${name} ${said(i)}`))), picture);
}

function plots() {
  const span = spanShown(), data = span === 'hour' ? hour : points;
  for (const b of byId('spans').children) b.setAttribute('aria-pressed', b.dataset.span === span);
  const of = span === 'hour' ? 'each point is ten seconds' : 'a point a second; p50 and p99 of ten seconds';
  byId('span-of').textContent = at === null || !data.length ? of + '; point at one, or use the arrow keys' : 'at ' + clock(data[nearest(data, at)].n, true) + '; Escape: now';
  replace(byId('plots'), charts().map(c => chart(c, data)));
  if (byId('more').open) replace(byId('more-plots'), moreCharts.map(c => chart(c, data)));
}

// The second that is pointed at is the same in all charts.
for (const id of ['plots', 'more-plots']) {
  const box = byId(id);
  box.addEventListener('pointermove', e => {
    const picture = e.target.closest('svg[data-to]');
    if (!picture) return;
    const { left, width } = picture.getBoundingClientRect(), { w, left: l, right } = chartSize;
    const share = ((e.clientX - left) / width * w - l) / (w - l - right), from = +picture.dataset.from, to = +picture.dataset.to;
    at = share >= 1 || share < 0 ? null : from + share * (to - from);
    plots();
  });
  box.addEventListener('pointerleave', () => { at = null; plots(); });
  box.addEventListener('keydown', e => {
    const data = spanShown() === 'hour' ? hour : points, by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (e.key === 'Escape') at = null;
    else if (by && data.length) {
      const next = (at === null ? data.length - 1 : nearest(data, at)) + by * (e.shiftKey ? 10 : 1);
      at = next >= data.length ? null : data[Math.max(next, 0)].n;
      e.preventDefault();
    } else return;
    plots();
  });
}
byId('spans').addEventListener('click', e => { if (e.target.dataset.span) { chosenSpan = e.target.dataset.span; at = null; plots(); } });
byId('more').addEventListener('toggle', plots);

// flow draws one pool's pairs: prefill endpoints on the left, decode endpoints on the right, a link as wide as its share.
function flow(pool, links) {
  const mine = links.filter(l => l.pool === pool.name);
  const names = new Map(pool.endpoints.map(e => [e.address, e.name]));
  const having = (...roles) => pool.endpoints.filter(e => roles.includes(e.role)).map(e => e.address);   // those that serve nothing, too
  const left = [...new Set(mine.map(l => l.prefill).concat(having('prefill')))].sort();
  const right = [...new Set(mine.map(l => l.decode).concat(having('decode', 'both')))].sort();
  if (!left.length && !right.length) return el('p', { class: 'soft' }, pool.name + ': no endpoints');
  const none = mine.length ? '' : 'no request in the last minute';
  const total = mine.reduce((s, l) => s + l.requests, 0) || 1, w = Math.max(300, Math.min(900, byId('flow').clientWidth)), gap = 14, thick = 110;
  const margin = Math.min(190, w * 0.39), middle = w / 2;
  const place = (side, of) => {
    let at = gap;
    return new Map(side.map(name => {
      const n = mine.filter(l => l[of] === name).reduce((s, l) => s + l.requests, 0);
      const node = { y: at, h: Math.max(thick * n / total, 3), n, used: 0 };
      at += Math.max(node.h, 12) + gap;
      return [name, node];
    }));
  };
  const from = place(left, 'prefill'), to = place(right, 'decode');
  const h = Math.max(...[...from.values(), ...to.values()].map(n => n.y + Math.max(n.h, 12))) + gap;
  const picture = svg('svg', { viewBox: `0 0 ${w} ${h}`, role: 'img', 'aria-label': `Flow of pool ${pool.name}: `
    + (none || mine.map(l => `${names.get(l.prefill) || l.prefill || 'decode alone'} to ${names.get(l.decode) || l.decode} ${l.requests}`).join(', ')) });
  for (const l of mine) {
    const a = from.get(l.prefill), b = to.get(l.decode), t = Math.max(thick * l.requests / total, 1);
    const ya = a.y + a.used + t / 2, yb = b.y + b.used + t / 2;
    a.used += t; b.used += t;
    picture.append(svg('path', { class: 'link ' + (l.prefill ? 'c-decode' : 'c-other'), 'stroke-width': t, d: `M${margin} ${ya} C${middle} ${ya} ${middle} ${yb} ${w - margin} ${yb}` },
      svg('title', {}, `${names.get(l.prefill) || l.prefill || 'decode alone'} → ${names.get(l.decode) || l.decode}: ${l.requests}`)));
  }
  for (const [name, n] of from) picture.append(svg('rect', { class: 'node ' + (!n.n ? 'idle' : name ? 'c-prefill' : 'c-other'), x: margin - 8, y: n.y, width: 8, height: n.h }),
    svg('text', { class: 'name', x: margin - 12, y: n.y + Math.min(n.h / 2 + 4, 14), 'text-anchor': 'end' }, (names.get(name) || name || 'decode alone') + ' · ' + (n.n || 'idle')));
  for (const [name, n] of to) picture.append(svg('rect', { class: 'node ' + (n.n ? 'c-decode' : 'idle'), x: w - margin, y: n.y, width: 8, height: n.h }),
    svg('text', { class: 'name', x: w - margin + 12, y: n.y + Math.min(n.h / 2 + 4, 14) }, (names.get(name) || name) + ' · ' + (n.n || 'idle')));
  return el('div', {}, el('h3', {}, pool.name + ' ', el('small', {}, none)), picture);
}

// table is a table with a caption for screen readers. Each column is a name, [name] where its cells are numbers. Cells bear their column's
// name, which narrow screens show.
function table(caption, columns, rows) {
  const head = el('tr', {}, ...columns.map(c => el('th', Array.isArray(c) ? { scope: 'col', class: 'n' } : { scope: 'col' }, String(c))));
  const body = rows.map(({ cells, chosen }) => el('tr', chosen ? { class: 'chosen' } : {}, ...cells.map((c, i) =>
    el('td', { 'data-label': String(columns[i]), ...(Array.isArray(columns[i]) ? { class: 'n' } : {}) }, c))));
  return el('div', { class: 'table', tabindex: '0', role: 'region', 'aria-label': caption, 'data-key': caption }, el('table', {}, el('caption', {}, caption), el('thead', {}, head), el('tbody', {}, ...body)));
}

// bar shows a share of something that has an end.
function bar(share, text, css) {
  const b = el('span', { class: 'bar ' + css });
  b.style.width = 100 * Math.min(1, Math.max(0, share)) + '%';
  return el('span', {}, el('span', { class: 'bar-space', 'aria-hidden': 'true' }, b), text);
}

// spark draws an endpoint's hour: values by time, in red where it was out (below 0), beside those of its peers.
function spark(steps, value, label, css, peers) {
  const w = 96, h = 22, t1 = hour.length ? hour.at(-1).n : 0, t0 = Math.min(hour.length ? hour[0].n : 0, t1 - 600);
  const x = t => w * (t - t0) / (t1 - t0 || 1), max = Math.max(1e-9, ...steps.map(value), ...peers ? peers.values() : []) * 1.05, y = v => h - 1 - (h - 2) * v / max;
  const line = list => list.map(([t, v], i) => (i && t - list[i - 1][0] <= 25 ? 'L' : 'M') + x(t).toFixed(1) + ' ' + y(v).toFixed(1)).join('');
  const known = steps.map(s => [s[0], value(s)]).filter(([, v]) => peers ? v > 0 : v >= 0);
  const picture = svg('svg', { class: 'spark ' + css, viewBox: `0 0 ${w} ${h}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label }, svg('title', {}, label));
  if (peers) picture.append(svg('path', { class: 'peers', d: line([...peers].filter(([, v]) => v > 0)) }));
  else if (known.length) picture.append(svg('path', { class: 'area', d: line(known) + `L${x(known.at(-1)[0]).toFixed(1)} ${h}L${x(known[0][0]).toFixed(1)} ${h}Z` }));
  if (known.length) picture.append(svg('path', { class: 'line', d: line(known) }));
  for (const s of steps) if (s[1] < 0) picture.append(svg('rect', { class: 'out', x: x(s[0]) - 1, width: Math.max(x(10) - x(0), 1.5), y: 0, height: h }));
  return picture;
}

const hourOf = (pool, e) => hours.get(pool.name + '\n' + e.address) || [];

// median of what endpoints wrote, by time: a token's time at an endpoint beside that of its peers
function peersOf(pool, e) {
  const all = new Map();
  for (const other of pool.endpoints) {
    if (other === e) continue;
    for (const [t, , each] of hourOf(pool, other)) if (each > 0) all.set(t, [...all.get(t) || [], each]);
  }
  return new Map([...all].toSorted(([a], [b]) => a - b).map(([t, list]) => [t, list.toSorted((a, b) => a - b)[list.length >> 1]]));
}

function load(pool, e, css) {
  const steps = hourOf(pool, e), out = steps.filter(s => s[1] < 0).length;
  return spark(steps, s => s[1], `Requests at ${e.name} in the last hour: at most ${count(Math.max(0, ...steps.map(s => s[1])))}` + (out ? `, out for ${ago(10e3 * out)}` : ''), css);
}

function pace(pool, e) {
  const value = el('span', {}, ms(e.time_per_output_token_ms)), steps = hourOf(pool, e);
  return steps.some(s => s[2] > 0) ? el('span', {}, spark(steps, s => s[2], `Time per token at ${e.name} in the last hour, dashed: the median of its peers`, 'c-decode', peersOf(pool, e)), value) : value;
}

// slowness is how long an endpoint needs for what its peers do in 1; from 3 on status warns.
function slowness(e) {
  const parts = [['prefill', e.prefill_slowness], ['decode', e.decode_slowness]].filter(([, times]) => times);
  if (!parts.length) return '–';
  return el('span', {}, ...parts.map(([leg, times], i) => el('span', times >= 3 ? { class: 'pill warn', title: leg } : { title: leg }, (i ? ' / ' : '') + times.toFixed(1) + '×')));
}

function find(text) {
  byId('search').value = text;
  byId('search').focus();
  update();
}

function named(e) {
  const button = el('button', { type: 'button', 'data-key': 'find ' + e.address, title: 'show its requests' }, e.name);
  button.addEventListener('click', () => find(e.address));
  return el('span', {}, button, e.group ? ' (' + e.group + ')' : '', e.unpaired ? el('small', {}, ' never used: pairs with no decode endpoint') : '');
}

function pools(all) {
  return all.map(p => {
    const rows = p.endpoints.map(e => {
      const css = (e.now?.word || e.role) === 'prefill' ? 'c-prefill' : 'c-decode';
      return { cells: [named(e), el('span', {}, el('span', { class: css }, e.role + (e.now ? ', now ' + e.now.word : '')), e.now?.why ? el('small', {}, ` since ${clock(Date.parse(e.now.since) / 1000, true)}: ${e.now.why}`) : ''),
        el('span', { class: 'pill ' + ({ up: 'good', out: e.paused ? 'warn' : 'bad' }[e.state] || 'warn') }, e.state + (e.state === 'out' && e.paused ? ', paused' : '')),
        load(p, e, css), e.running < 0 ? '–' : count(e.running) + ' + ' + (e.waiting < 0 ? '–' : count(e.waiting)),
        e.requests ? `${count(e.requests)}, ${count(e.prompt_tokens)} tokens` : '0',
        e.kv_usage < 0 ? '–' : bar(e.kv_usage, percent(e.kv_usage), e.kv_usage >= 0.95 ? 'c-bad' : css), count(e.hops) + (e.hit_share < 0 ? '' : `, ${percent(e.hit_share)} cached`),
        e.output_tokens_per_second < 0 ? '–' : count(e.output_tokens_per_second) + '\u00a0tokens/s', pace(p, e), slowness(e)] };
    });
    return el('div', {}, el('h3', {}, p.name + ' ', el('small', {}, `${p.models.join(', ')} · prefix index ${count(p.index_blocks)} blocks`
      + (p.endpoints.some(e => e.role === 'prefill') ? ` · prefill ${percent(p.prefill_busy)} busy in the last minute` : '') + (p.wanted ? ' · ' + p.wanted : '')
      + (p.output_tokens_per_second < 0 ? '' : ` · writes ${count(p.output_tokens_per_second)} tokens/s`
        + (p.time_per_output_token_ms ? ` at ${ms(p.time_per_output_token_ms)} each` : '') + ' in the last minute'))),
      memory(p.memory),
      table('Endpoints of pool ' + p.name, ['endpoint', 'role', 'health', 'requests, last hour', ['running + queued'], ['booked'], 'KV cache used', ['of latest 256'], ['writes, last minute'], ['each token in, last hour and minute'], ['of its peers’ time']], rows));
  });
}

// memory says what a pool's conversations need of its engines' memory, once some have come back.
function memory(m) {
  if (!m || !m.had_tokens && !m.waiting_for_memory) return '';
  const again = m.had_tokens ? `; of what they had, ${percent(m.evicted_tokens / m.had_tokens)} was computed again in the last ten minutes since it was evicted, ${percent(m.elsewhere_tokens / m.had_tokens)} since another engine holds it` : '';
  return el('p', { class: 'soft' }, `${count(m.conversations)} conversations, ${count(m.expected_tokens)} tokens expected back`
    + (m.memory_tokens ? ` of ${count(m.memory_tokens)} that engines keep` : '') + again
    + (m.waiting_for_memory ? `; ${count(m.waiting_for_memory)} cold prompts wait for room` : ''));
}

// replicas shows whose parts are summed, where there are several.
function replicas(status) {
  const rows = status.replicas.toSorted((a, b) => a.name < b.name ? -1 : 1).map(r => ({ cells: [r.name, (r.ready ? 'ready' : 'not ready') + (r.redis ? '' : ', without Redis'), r.version,
    ago(new Date(status.now) - new Date(r.started)), count(r.reservations)] }))
    .concat((status.silent || []).map(name => ({ cells: [name, status.sharing.up && !status.sharing.no_answer ? 'no answer' : 'not asked, without Redis', '–', '–', '–'] })),
      (status.gone || []).map(g => ({ cells: [g.name, `gone, last heard ${ago(new Date(status.now) - new Date(g.heard))} ago`, '–', '–', '–'] })));
  byId('replicas').hidden = rows.length < 2;
  show('replicas', rows, () => [el('h2', {}, 'Replicas ', el('small', {}, 'whose parts are summed on this page')),
    table('Replicas of Tandem', ['replica', 'state', 'release', 'up', ['booked']], rows)]);
}

function decision(t) {
  const bad = t.status >= 500 || t.ended === 'cut' ? 'bad' : t.status >= 200 && t.status < 400 ? 'good' : '';
  const lost = t.prefill && !t.decode && !t.prefill_final;   // prefill failed, and the request with it
  const way = [t.prefill, t.decode].filter(Boolean).join(' → ');
  const reason = lost ? 'prefill failed' : t.reason === 'cheaper' ? 'cheaper than two hops' : (t.reason || '').replaceAll('_', ' ');
  const d = el('details', {}, el('summary', {}, el('span', { class: 'pill ' + bad }, end(t)), el('b', {}, t.route.replace('_', ' ') + (reason ? ` (${reason})` : '')),
    el('span', {}, way), el('span', { class: 'soft' }, `${t.cached_tokens < 0 ? '~' : ''}${count(t.prompt_tokens)} tokens${t.cached_tokens > 0 ? ', ' + count(t.cached_tokens) + ' cached' : ''}`),
    el('span', { class: 'soft' }, [t.prefill_ns ? 'prefill ' + fromNano(t.prefill_ns) : '', t.decode_ns ? 'decode ' + fromNano(t.decode_ns) : '', t.replans ? t.replans + ' replans' : ''].filter(Boolean).join(', ')),
    el('span', { class: 'soft' }, clock(Date.parse(t.started) / 1000, true)), el('span', { class: 'id soft' }, t.request_id)));
  const gone = (t.end_gone_with || []).join(', ');
  d.append(el('p', { class: 'words' }, t.words + (gone ? `Its end was lost when ${gone} ended without a shutdown.` : '')));
  d.append(t.weighed ? weighed(t) : '');
  return d;
}

// end says how a request ended.
function end(t) {
  if (t.status) return t.status + (t.ended === 'cut' ? ', cut' : t.ended === 'ticket_refused' ? ', ticket refused' : t.refused ? ', ' + t.refused : '');
  if (t.ended) return t.ended === 'client_gone' ? 'client left' : 'no answer';
  if (t.end_gone_with || Date.now() - new Date(t.started) > 15 * 60e3) return 'unknown';
  return t.end_elsewhere ? 'unknown here' : 'running';
}

const total = parts => parts ? parts.reduce((s, p) => s + p.value, 0) : Infinity;

const notAlone = { busy: ' (not offered: its answers would suffer)', too_long: ' (not offered: the prompt is too long, answers would suffer)' };

function weighed(t) {
  const parts = list => list ? `${price(total(list))} = ${list.filter(p => Math.abs(p.value) >= 1e-6 || list.length === 1).map(p => `${p.name} ${price(p.value)}`.replaceAll(' ', '\u00a0')).join(' + ')}` : '–';
  return table('What was weighed for ' + t.request_id, ['endpoint', 'role', ['blocks held'], 'to prefill', 'to decode', 'to do both'], t.weighed.map(w => {
    const chosen = w.endpoint === t.prefill || w.endpoint === t.decode;
    return { chosen, cells: [(chosen ? '✓\u00a0' : '') + w.endpoint + (w.out ? ' (out)' : ''), w.role, w.out ? '–' : String(w.hit_blocks), parts(w.prefill), parts(w.decode), parts(w.alone) + (notAlone[w.not_alone] || '')] };
  }));
}

// decisions shows the latest ones. An open one can be read, and rows be walked through, for as long as one likes.
function decisions(recent) {
  const held = byId('recent').querySelector('details[open], :focus-visible');
  byId('held').textContent = held ? '· the list stands still while one is open or has the focus' : '';
  if (!held) show('recent', recent, all => all.length ? all.map(decision) : [el('p', { class: 'soft' }, byId('which').value || byId('search').value
    ? 'none among the latest 256 of each replica' + (byId('search').value ? '; models and tenants are known with usage in the configuration' : '') : 'none yet')]);
}

function draw(status) {
  const state = byId('state');
  state.textContent = status.ready ? 'ready' : 'not ready';
  state.className = 'pill ' + (status.ready ? 'good' : 'bad');
  byId('about').textContent = `${location.host} · up ${ago(new Date(status.now) - new Date(status.started))} · ${status.version}`
    + ` · ${status.scope}`;
  show('attention', status.attention, attention);
  tiles(status.minute, status);
  plots();
  show('flow', [byId('flow').clientWidth, status.flow, status.pools.map(p => p.endpoints.map(e => [e.address, e.name, e.role]))], () => status.pools.map(p => flow(p, status.flow)));
  show('pools', [status.pools, hour.at(-1)?.n], ([all]) => pools(all));
  replicas(status);
  decisions(status.recent);
}

function ago(millis) {
  const s = Math.round(millis / 1000);
  return s < 120 ? s + ' s' : s < 7200 ? Math.round(s / 60) + ' min' : s < 172800 ? Math.round(s / 3600) + ' h' : Math.round(s / 86400) + ' days';
}

let asked = 0;   // answers that a newer question has overtaken are dropped

async function update() {
  const mine = ++asked, which = byId('which').value;
  try {
    const query = new URLSearchParams({ since: points.at(-1)?.n || 0, hour: hour.at(-1)?.n || 0, search: byId('search').value, ...which ? { [which]: true } : {} });
    const answer = await fetch('status.json?' + query, { signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(answer.status);
    const status = await answer.json();
    if (mine !== asked) return;
    if (status.started !== version) {   // another process, or a new one: its points count anew
      const anew = version !== '';
      points = []; hour = []; hours = new Map(); version = status.started;
      if (anew) return update();
    }
    points = points.concat(status.points).slice(-kept);
    hour = hour.concat(status.hour || []).slice(-keptSteps);
    for (const of of status.endpoint_hours || []) {
      const key = of.pool + '\n' + of.address, had = hours.get(key) || [], last = had.at(-1)?.[0] || 0;
      hours.set(key, had.concat(of.steps.filter(s => s[0] > last)).slice(-keptSteps));
    }
    draw(status);
  } catch (e) {
    if (mine !== asked) return;
    byId('state').textContent = 'no answer';
    byId('state').className = 'pill bad';
  }
}

byId('which').addEventListener('change', update);
byId('search').addEventListener('input', update);
byId('find').addEventListener('submit', e => { e.preventDefault(); update(); });

async function loop() {
  if (!document.hidden) await update();
  setTimeout(loop, 1000);
}

loop();
document.addEventListener('visibilitychange', () => { if (!document.hidden) update(); });
