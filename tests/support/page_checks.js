// What a page must hold to be usable by keyboard and screen reader, and readable. Each check returns a list of findings.
({
  names: () => {
    const found = [], say = (what, node) => found.push(`${what}: ${node.outerHTML.slice(0, 120)}`);
    const text = node => (node.getAttribute('aria-label') || (['SELECT', 'INPUT'].includes(node.tagName) ? '' : node.textContent) || '').trim();
    const name = node => text(node) || (node.labels && [...node.labels].map(text).join(' ').trim())
      || (node.getAttribute('aria-labelledby') || '').split(' ').map(id => document.getElementById(id)).filter(Boolean)
         .map(text).join(' ').trim() || node.title;
    for (const node of document.querySelectorAll('button, input, select, a[href], [tabindex], [role=img], [role=tab], [role=region], nav > [role]'))
      if (!name(node)) say('without a name', node);
    for (const node of document.querySelectorAll('canvas'))
      if (node.getAttribute('role') !== 'img') say('a canvas without a role', node);
    const ids = [...document.querySelectorAll('[id]')].map(node => node.id);
    for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) found.push(`the id ${id} is there twice`);
    for (const node of document.querySelectorAll('[aria-controls], [aria-labelledby], label[for]'))
      for (const key of ['aria-controls', 'aria-labelledby', 'for']) {
        const id = node.getAttribute(key); if (id && !document.getElementById(id)) say(`${key} names nothing`, node);
      }
    const tabs = [...document.querySelectorAll('[role=tab]')];
    if (tabs.filter(tab => tab.getAttribute('aria-selected') === 'true').length !== 1) found.push('not one tab is selected');
    if (tabs.filter(tab => tab.tabIndex === 0).length !== 1) found.push('not one tab is reached by Tab');
    for (const tab of tabs) {
      const panel = document.getElementById(tab.getAttribute('aria-controls'));
      if (panel.getAttribute('role') !== 'tabpanel') say('no panel', panel);
    }
    if (!document.documentElement.lang) found.push('no language');
    if (!document.title) found.push('no title');
    if (document.querySelectorAll('h1').length !== 1 || document.querySelectorAll('main').length !== 1) found.push('h1 or main');
    for (const table of document.querySelectorAll('table'))
      if (!table.caption || [...table.querySelectorAll('th')].some(th => !th.scope)) say('a table without caption or scopes', table);
    for (const list of document.querySelectorAll('dl')) for (const child of list.children)
      if (!['DT', 'DD', 'DIV'].includes(child.tagName)) say('in a description list', child);
    return found;
  },

  contrast: () => {
    const parse = text => { const m = text.match(/[\d.]+/g).map(Number); return [m[0], m[1], m[2], m.length > 3 ? m[3] : 1]; };
    const light = c => { const [r, g, b] = c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
      return .2126 * r + .7152 * g + .0722 * b; };
    const behind = node => {
      for (let at = node; at; at = at.parentElement) { const c = parse(getComputedStyle(at).backgroundColor); if (c[3] > .99) return c.slice(0, 3); }
      return [255, 255, 255];
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode.parentElement;
      if (!walker.currentNode.textContent.trim() || ['SCRIPT', 'STYLE', 'OPTION'].includes(node.tagName)) continue;
      if (!node.checkVisibility() || node.closest('.sr, .skip, [aria-hidden=true]')) continue;
      const style = getComputedStyle(node), fore = parse(style.color).slice(0, 3), size = parseFloat(style.fontSize);
      const [a, b] = [light(fore), light(behind(node))].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
      const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
      if (ratio < least) found.push(`${ratio.toFixed(2)} of ${least}: ${walker.currentNode.textContent.trim().slice(0, 40)}`);
    }
    return [...new Set(found)];
  },

  // Colours of what is drawn, against the panel that it is drawn on: 3 is what graphics need.
  drawn: () => {
    const style = getComputedStyle(document.documentElement);
    const parse = name => { const box = document.createElement('i'); box.style.color = style.getPropertyValue(name); document.body.append(box);
      const m = getComputedStyle(box).color.match(/[\d.]+/g).map(Number); box.remove(); return m.slice(0, 3); };
    const light = c => { const [r, g, b] = c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
      return .2126 * r + .7152 * g + .0722 * b; };
    const panel = light(parse('--panel'));
    return ['--short', '--long', '--decode', '--warn', '--ok', '--bad', '--focus'].map(name => [name, light(parse(name))])
      .filter(([, l]) => (Math.max(l, panel) + .05) / (Math.min(l, panel) + .05) < 3).map(([name]) => name);
  },

  // Further than the window is wide: nothing may make the page itself scroll sideways.
  wide: () => {
    const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    return wide > 1 ? [`${wide} pixels`] : [];
  },
})
